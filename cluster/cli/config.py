"""`baton config`: what the file and the flags come to."""

from __future__ import annotations

import typer

from cluster.cli import options
from cluster.cli.serve import DEMO
from cluster.config.settings import to_toml
from protos.errors import BatonError


def config(
    file: options.ConfigFile = None,
    model: options.Model = None,
    further: options.Set = None,
) -> None:
    """Prints every setting in force as TOML that --config reads back: of `baton up` if no file or model is given."""
    given = {"model": model} if file is not None or model is not None else DEMO
    settings = options.settings(file, given, further)
    typer.echo(to_toml(settings), nl=False)
    if model is not None:
        try:
            settings.check_model()
        except BatonError as error:  # the file may be for another machine
            typer.echo(f"baton: {error.message}: so it cannot be served from here", err=True)
