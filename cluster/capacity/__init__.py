"""The desired fleet: one owner, changes with their reasons, and what brings them about."""
