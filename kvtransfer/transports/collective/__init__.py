"""Lanes between workers: groups of links that span all ranks of both."""
