"""Predictions of workers' latencies, learned from measured ones."""
