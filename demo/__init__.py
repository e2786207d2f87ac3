"""The small model that ships with Baton and heads that draft for it, with the scripts that made them: `demo.train`,
`demo.train_heads`."""
