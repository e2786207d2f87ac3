"""Batches beside people's requests: interference, exactly one result a line, memory."""
