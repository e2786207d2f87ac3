"""One turn of a conversation, in no API's words: its tools, the form of its answer, and what the answer holds."""
