"""Text in, token ids out, and back: the only place in Baton where strings are turned into tokens."""
