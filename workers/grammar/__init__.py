"""Constrained answers: grammars compiled beside the engine, and masks of allowed tokens for its sampler."""
