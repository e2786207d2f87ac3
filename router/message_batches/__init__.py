"""Anthropic's Message Batches, on the store and the workers of OpenAI's batches."""
