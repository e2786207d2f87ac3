"""Shared by every HTTP face: the protocol on a connection, middleware, streamed responses, errors, the access log."""
