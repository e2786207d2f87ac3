"""OpenAI's HTTP API. Every documented parameter is honoured or refused by name; none is ignored."""
