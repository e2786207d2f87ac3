"""The load client: asks any OpenAI-compatible server for completions and measures what its users would feel."""
