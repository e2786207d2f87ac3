"""Drafts of next tokens, and how many of them a step verifies."""
