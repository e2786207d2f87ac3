"""The engine's side of KV transfer: send, receive, keep lanes."""
