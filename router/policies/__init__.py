"""Routing policies choose the workers of a request. They are pure functions, composed from ranks, limits and pairs."""
