"""Commands of a client of the API."""
