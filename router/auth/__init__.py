"""Tenants: their keys, and the limits of what each may ask."""
