"""Data that outlives requests: files of clients, batches of requests, and their results."""
