"""The deployment as one object: config, Ray actors, supervision, scaling and the `baton` command."""
