"""Structured answers: a grammar from a request's schema, checked before a worker sees it."""
