"""Workers that write answers: take over a request's KV cache and generate its tokens."""
