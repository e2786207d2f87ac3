"""Which workers a request goes to: pure functions over values, composed from ranks, limits and the choice of a pair."""
