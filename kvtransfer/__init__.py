"""Moving KV cache between workers: block identity, sessions, resharding and transports."""
