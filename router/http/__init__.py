"""What every HTTP face shares: the protocol on a connection, middleware, streamed responses, errors, the access log."""
