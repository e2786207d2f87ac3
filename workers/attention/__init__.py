"""Attention over a paged KV cache, one backend a kind of machine."""
