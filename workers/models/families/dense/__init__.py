"""Families whose layers are attention and one MLP, one module each: a spec of at most 60 lines."""
