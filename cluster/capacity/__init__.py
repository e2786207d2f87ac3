"""The desired fleet, and what brings it about."""
