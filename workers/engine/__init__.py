"""The engine: plan a step, run it, sample, apply. It never asks which pool it serves."""
