"""Families with experts."""
