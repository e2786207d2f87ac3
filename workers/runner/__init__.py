"""A planned step on the device."""
