"""The gateway: CPU seconds, floors, overload."""
