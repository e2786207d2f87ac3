"""Revisions of model and settings: which workers have which, and how texts of each become tokens."""
