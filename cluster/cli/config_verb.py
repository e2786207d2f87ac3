"""`baton config`: the settings that result from the file and the flags."""

from __future__ import annotations

import typer

from cluster.cli import options
from cluster.cli.serve import DEMO
from cluster.config.settings import to_toml
from protos.errors import BatonError
from protos.model_files.hub_name import HubName


@options.takes_settings("model", several=True)
def config(given: options.GivenSettings) -> None:
    """Print every setting in force as TOML for --config. Without a file or model: the settings of `baton up`."""
    is_of_demo = given.file is None and not given.flags
    configs = given.configs(**DEMO if is_of_demo else {})
    for settings in configs:
        if len(configs) > 1:
            typer.echo(f"# the model {settings.router.model_name}")
        typer.echo(to_toml(settings), nl=False)
        if given.flags and HubName.of(settings.worker.model) is None:
            try:
                settings.check_model()
            except BatonError as error:  # the configuration may be meant for another machine
                typer.echo(f"baton: {error.message}: so it cannot be served from here", err=True)
