"""The load client: sends completions to any OpenAI-compatible server and measures what its users would notice."""
