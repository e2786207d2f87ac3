"""`baton simulate`."""
