"""KV transfer."""
