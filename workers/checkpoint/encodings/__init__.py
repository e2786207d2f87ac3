"""One module for each encoding of linear weights. `workers.checkpoint.registry` finds them by name."""
