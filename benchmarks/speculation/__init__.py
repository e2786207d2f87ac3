"""Speculation: the same answers, and how much sooner."""
