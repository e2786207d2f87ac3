"""How gateways learn of workers."""
