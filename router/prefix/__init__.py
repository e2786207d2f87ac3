"""The prefix index of the blocks that each worker caches: its backends, and the feed of KV events that updates it."""
