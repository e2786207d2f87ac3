"""The ledger: how fast it is read, and what it costs to write."""
