"""Tool calls in a model's answer: how each family of models writes them, and how they are read while they arrive."""
