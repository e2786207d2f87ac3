"""The `baton` command. A verb is a function with typer options in a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer


class Verb(NamedTuple):
    module: str
    function: str
    told: str
    panel: str


SERVE, USE, APART = "Serve a model", "Use and observe a cluster", "Run the parts of a cluster apart"

VERBS: dict[str, Verb] = {
    "up": Verb("cluster.serve", "up", "The demo model on this machine; Ctrl-C stops everything.", SERVE),
    "serve": Verb("cluster.serve", "serve", "Gateway, prefill and decode workers, supervised.", SERVE),
    "config": Verb("cluster.effective", "config", "Print the settings in force, as a file for --config.", SERVE),
    "status": Verb("cluster.status", "status", "Show pools, workers, load, KV and lanes.", USE),
    "why": Verb("cluster.why", "why", "Say why a request was routed as it was.", USE),
    "drain": Verb("cluster.drain", "drain", "Move a worker's requests elsewhere, and end it.", USE),
    "chat": Verb("cluster.chat", "chat", "Talk to the model.", USE),
    "bench": Verb("cluster.bench.verb", "bench", "Measure it under load.", USE),
    "simulate": Verb(
        "cluster.simulate.verb", "simulate", "The same code in virtual time: sizes, faults, policies.", USE
    ),
    "key": Verb("cluster.key", "key", "Make an API key for a tenant.", SERVE),
    "gateway": Verb("cluster.gateway", "gateway", "The router, for workers that run elsewhere.", APART),
    "pools": Verb("cluster.supervise", "pools", "Supervised workers, for gateways elsewhere.", APART),
    "worker": Verb("cluster.foreground", "worker", "One worker in this terminal, without Ray.", APART),
}


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The verb that `arguments` call is imported; of the others the line in the help is enough."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(baton)
    for name, verb in VERBS.items():
        function = _loaded(verb) if name in arguments[:1] else _not_called
        app.command(name, short_help=verb.told, rich_help_panel=verb.panel)(function)
    return app


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"baton {version('baton')}")
        raise typer.Exit


def baton(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """A distributed LLM serving cluster: prefill and decode pools with the KV cache passed between them."""


def _loaded(verb: Verb) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(verb.module), verb.function)
    return function


def _not_called() -> None:
    raise AssertionError("a verb that is called is imported")


def main() -> None:
    """Exits with 0, 1 (it could not go on), 2 (a setting or flag is wrong), or 130 (it was stopped by force)."""
    # Read at gRPC's import; else it tells of every fork of Ray's and of every connection that a stop ends.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # so early that no verb has taken over Ctrl-C yet: nothing was started
        sys.exit(130)
    except SystemExit as ended:
        if "cluster.machines" in sys.modules:
            from cluster.stopping import leave

            leave(ended.code if isinstance(ended.code, int) else 1)
        raise


def _run(arguments: Sequence[str]) -> None:
    from protos.errors import BatonError, Misconfigured

    try:
        make_app(arguments)()
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Misconfigured) else 1)
