"""The simulator: its errors and its power to find bugs."""
