"""Chooses the rows of each step: requests, blocks, preemption. Pure."""
