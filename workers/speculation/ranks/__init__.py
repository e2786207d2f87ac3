"""The part of proposers that computes with a model, on every rank."""
