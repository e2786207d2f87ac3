"""The `baton` command. A verb is a function with typer options in a module of its own, imported when it is called."""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from protos.release import VERSION, WIRE, commit


class Verb(NamedTuple):
    module: str
    function: str
    help: str
    panel: str


SERVE, USE, APART = "Serve a model", "Use and observe a cluster", "Run the parts of a cluster apart"

VERBS: dict[str, Verb] = {
    "up": Verb("cluster.cli.serve", "up", "A model on this machine, by default the demo; Ctrl-C stops it.", SERVE),
    "serve": Verb("cluster.cli.serve", "serve", "Gateway, prefill and decode workers, supervised.", SERVE),
    "config": Verb("cluster.cli.config_verb", "config", "Print the settings in force, as a file for --config.", SERVE),
    "status": Verb("cluster.cli.status_verb", "status", "Show pools, workers, load, KV and lanes.", USE),
    "why": Verb("cluster.cli.why", "why", "Show why a request was routed as it was, or the fleet changed.", USE),
    "doctor": Verb("cluster.doctor.doctor_verb", "doctor", "Find what is wrong with a running cluster.", USE),
    "drain": Verb("cluster.cli.change.drain_verb", "drain", "Move a worker's requests elsewhere, and end it.", USE),
    "scale": Verb("cluster.cli.change.fleet_verbs", "scale", "Change the number of workers while they serve.", USE),
    "flip": Verb("cluster.cli.change.fleet_verbs", "flip", "Change the role of a worker while it runs.", USE),
    "roll": Verb("cluster.cli.change.fleet_verbs", "roll", "Replace the model or settings of all workers.", USE),
    "adapter": Verb("cluster.cli.change.adapter", "adapter", "Load, unload or list LoRA adapters.", USE),
    "plan": Verb("cluster.cli.change.plan", "plan", "Show which fleet the present load needs, and why.", USE),
    "usage": Verb("cluster.cli.cost_verbs", "usage", "Show who used how many tokens.", USE),
    "costs": Verb("cluster.cli.cost_verbs", "costs", "Show what is charged, and what it costs.", USE),
    "chat": Verb("cluster.cli.chat_verb", "chat", "Talk to the model.", USE),
    "batch": Verb("cluster.cli.client.batch_verb", "batch", "Run a file of requests when there is room.", USE),
    "bench": Verb("cluster.bench.bench_verb", "bench", "Measure it under load.", USE),
    "simulate": Verb(
        "cluster.simulate.cli.simulate", "simulate", "The same code in virtual time: sizes, faults, policies.", USE
    ),
    "quantize": Verb(
        "cluster.quantise.quantize_verb", "quantize", "Write a checkpoint's weights with 4 or 8 bits.", SERVE
    ),
    "models": Verb("cluster.hub.models_verb", "models", "List or remove the models that are cached here.", SERVE),
    "key": Verb("cluster.cli.key_verb", "key", "Make an API key for a tenant.", SERVE),
    "gateway": Verb("cluster.cli.gateway_verb", "gateway", "The router, for workers that run elsewhere.", APART),
    "pools": Verb("cluster.cli.pools_verb", "pools", "Supervised workers, for gateways elsewhere.", APART),
    "worker": Verb("cluster.cli.worker_verb", "worker", "One worker in this terminal, without Ray.", APART),
}
MEASURING = ("bench", "simulate")
WIDE_COLUMNS = 140
"""From here on the table of options has room for the longest name, type and prose."""


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Imports the verb in `arguments`; of other verbs only the line of help is needed."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(baton)
    for name, verb in VERBS.items():
        function = _loaded(verb) if name in arguments[:1] else _not_called
        app.command(name, cls=_Command, short_help=verb.help, rich_help_panel=verb.panel)(function)
    return app


class _Command(TyperCommand):
    """Reports an option's invalid value in one line: the value and what is allowed. Help for a narrow terminal has no
    columns for names, types and prose: they would cut all three."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns < WIDE_COLUMNS:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from protos.errors import Misconfigured

        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            wrong = getattr(error.__cause__, "errors", None)
            if wrong is None or error.param is None:
                raise
            flag, (first, *_) = error.param.opts[0], wrong()
            message = f"{flag} {shlex.quote(str(first['input']))}: {_fix(first, _range(error.param))}"
            raise Misconfigured(message, param=flag.lstrip("-")) from error


def _range(param: Any) -> str | None:
    """Returns the range of an option with both bounds."""
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    return None if low is None or high is None else f"give a number from {_bound(low)} to {_bound(high)}"


def _fix(wrong: Mapping[str, Any], bounded: str | None) -> str:
    """Rewrites a pydantic error, which names only one of two bounds."""
    bounds = wrong.get("ctx", {})
    match wrong["type"]:
        case "int_parsing" | "int_from_float":
            return "give a whole number"
        case "float_parsing":
            return "give a number"
        case "greater_than_equal":
            return bounded or f"give {_bound(bounds['ge'])} or more"
        case "less_than_equal":
            return bounded or f"give {_bound(bounds['le'])} or less"
        case _:
            return str(wrong["msg"]).removeprefix("Value error, ").rstrip(".")


def _bound(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {VERSION}" + (f" (commit {commit()})" if commit() else "") + f", wire {WIRE}")
        raise typer.Exit


def baton(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A distributed LLM serving cluster: prefill and decode pools with the KV cache passed between them."""


def _loaded(verb: Verb) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(verb.module), verb.function)
    return function


def _not_called() -> None:
    raise AssertionError("a verb that is called is imported")


def main() -> None:
    """Returns 0, 1 (it failed), 2 (a setting or flag is wrong), 130 (stopped by force) or 143 (a measurement was ended
    by SIGTERM)."""
    # Read when gRPC is imported; without it gRPC logs every fork of Ray and every connection that a stop closes.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if sys.argv[1:2] in ([verb] for verb in MEASURING):
        _measure(sys.argv[1:])
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # before a verb has replaced the handler of Ctrl-C: nothing has been started
        sys.exit(130)


def _measure(arguments: Sequence[str]) -> NoReturn:
    """On SIGTERM, prints what has been measured so far."""
    from cluster.process.gc_tuning import collect_rarely
    from cluster.process.signals import INTERRUPTED, Termination

    collect_rarely()
    termination, code = Termination(), 0
    try:
        _run(arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    sys.exit(termination.code(code))


def _run(arguments: Sequence[str]) -> None:
    from protos.errors import BatonError, Misconfigured

    try:
        make_app(arguments)()
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Misconfigured) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from cluster.process.logs import lead_nowhere

        lead_nowhere(sys.stdout)  # else the buffered output would fail again at the exit
        print(f"baton: {error.filename or 'stdout'}: {os.strerror(error.errno)}: make room there", file=sys.stderr)
        sys.exit(1)
