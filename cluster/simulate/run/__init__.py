"""One run: its deployment, clients, faults and invariants."""
