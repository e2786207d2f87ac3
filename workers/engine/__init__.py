"""The engine: plan a step, run it, sample, apply. It does not depend on its pool."""
