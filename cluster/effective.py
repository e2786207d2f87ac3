"""`baton config`: what the file and the flags come to."""

from __future__ import annotations

import typer

from cluster import flags
from cluster.serve import DEMO
from cluster.settings import to_toml


def config(
    file: flags.ConfigFile = None,
    model: flags.Model = None,
    further: flags.Set = None,
) -> None:
    """Prints every setting in force as TOML that --config reads back: of `baton up` if no file or model is given."""
    given = {"model": model} if file is not None or model is not None else DEMO
    typer.echo(to_toml(flags.settings(file, given, further)), nl=False)
