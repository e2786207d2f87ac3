"""Ollama's API: chats and texts as lines of JSON, for desktop clients."""
