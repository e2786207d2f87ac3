"""OpenAI's Responses API, without a store: the same jobs as a chat's."""
