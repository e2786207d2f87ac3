"""The world around the simulated code: time, network, lanes, Redis, faults, load."""
