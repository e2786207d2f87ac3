"""Tenants: their keys and their limits."""
