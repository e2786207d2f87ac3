"""Decoders whose layers `transformers` computes, over Baton's cache and attention (docs/adr/0048)."""
