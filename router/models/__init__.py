"""Several models behind one address."""
