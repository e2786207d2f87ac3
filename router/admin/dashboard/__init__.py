"""`GET /`: what the gateway knows, for people with a browser."""
