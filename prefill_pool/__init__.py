"""Workers that read prompts: compute the KV cache of a prompt and offer it for transfer."""
