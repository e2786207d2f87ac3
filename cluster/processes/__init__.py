"""Several gateway processes behind one port, and the process that supervises them (ADR of that name)."""
