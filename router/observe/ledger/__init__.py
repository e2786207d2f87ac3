"""A row for each request, in a database file: who used what, what it is charged, and what it cost."""
