"""Finds what is wrong with a running cluster: facts are gathered, then judged by rules over values."""
