"""Batches of requests: OpenAI's Files and Batches, Anthropic's message batches, and what runs their lines."""
