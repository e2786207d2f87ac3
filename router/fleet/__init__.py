"""The workers that the router knows: connections, state, load."""
