"""Which worker holds how much of a prompt: the index, its backends, and the feed of KV events that keeps it true."""
