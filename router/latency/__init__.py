"""Predicts workers' times from measured ones."""
