"""Traces of recent requests, for the admin API."""
