"""`baton config`: what the file and the flags come to."""

from __future__ import annotations

import typer

from cluster import flags
from cluster.settings import to_toml


def config(
    file: flags.ConfigFile = None,
    model: flags.Model = None,
    further: flags.Set = None,
) -> None:
    """Prints every setting in force as TOML that --config reads back."""
    typer.echo(to_toml(flags.settings(file, {"model": model}, further)), nl=False)
