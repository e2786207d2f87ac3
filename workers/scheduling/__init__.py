"""Which rows a step has: requests, blocks, preemption. Pure."""
