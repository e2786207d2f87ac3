"""The verbs of the `baton` command: a module each."""
