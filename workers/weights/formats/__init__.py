"""One module for each encoding of linear weights. `workers.weights.registry` finds them by name."""
