"""Routing and the prefix index."""
