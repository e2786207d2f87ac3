"""Verbs that change a running cluster."""
