"""Attention over a paged KV cache, with one backend per kind of device."""
