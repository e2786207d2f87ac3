"""Anthropic's Messages API: the same jobs as a chat's, in that API's words."""
