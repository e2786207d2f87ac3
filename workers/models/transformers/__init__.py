"""Decoders whose layers `transformers` computes, over Baton's cache and attention."""
