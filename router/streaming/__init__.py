"""The compiled path of a token, from a worker's message to its client's connection."""
