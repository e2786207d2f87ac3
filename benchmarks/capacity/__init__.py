"""Changes of the fleet under load."""
