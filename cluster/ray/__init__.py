"""Ray: sessions, placement, and the process that supervises with its library."""
