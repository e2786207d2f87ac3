"""The workers that the router knows, with their connections, states and loads."""
