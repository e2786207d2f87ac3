"""The flags of settings, made from their declarations, and the ClusterConfig made from flags and a file; flags take
precedence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from cluster.config.cluster_config import ClusterConfig
from cluster.config.declared import declared_settings
from cluster.config.settings import Table, make_blaming, merge, read_file, setting, table_of
from cluster.config.several_models import TABLE, make_configs, models_given
from cluster.process.logs import LogFormat
from protos.errors import Misconfigured
from protos.model_files.hub_name import HubName
from protos.setting import number
from router.routing.registry import check_names
from workers.adapters.names import parse_adapters

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings; `baton config` prints one.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting (docs/settings.md), as worker.prefill_chunk=256. Repeatable."
    ),
]
SetKeys = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key of the scenario, as workload.rate=12. Repeatable."),
]
Log = Annotated[LogFormat, typer.Option("--log-format", help="Log lines as text, or as JSON.")]
Colocated = Annotated[bool, typer.Option("--colocated", help="Workers that prefill and decode, instead of two pools.")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Number of colocated workers; implies --colocated. Default: 1.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="NAME=PATH", help="A LoRA adapter's folder or hub's name, served as NAME. Repeatable."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="A folder, a GGUF file, or a hub's name, as Qwen/Qwen3-0.6B. Several: NAME=PATH, repeated.",
    ),
]
POOLS = (
    "pools.prefill", "pools.decode", "worker.tp", "pools.prefill_tp", "pools.decode_tp", "worker.device",
    "worker.dtype", "worker.kv_dtype", "worker.quantize", "worker.expert_parallel", "worker.max_model_len",
    "worker.host_kv_gib", "worker.speculate",
)  # fmt: skip
GATEWAY = (
    "host", "port", "grpc_port", "processes", "index", "router.policy", "router.shadow_policy",
    "router.text.chat_template", "router.text.tool_parser", "router.text.reasoning_parser",
    "router.text.sampling", "router.http.access_log",
)  # fmt: skip
PLANNER = ("planner.autoscale", "router.ttft_ms", "router.tpot_ms")
Verb = Callable[..., Any]
MAX_METAVAR = 40  # characters; more choices are listed in the help, where lines are wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings:
    """Tables of the settings given on the command line, over those of `file`."""

    file: Path | None
    further: list[str]
    flags: Table
    workers: int | None = None  # --workers without --colocated

    def config(self, **over: Any) -> ClusterConfig:
        """The configuration of one model. `over` has flags, too. Raises Misconfigured."""
        configs = self.configs(**over)
        if len(configs) > 1:
            raise Misconfigured(
                f"there are {len(configs)} models: `baton serve` and `baton gateway` serve several; this command is "
                "for one: name it with --model, and its --fleet",
                param="model",
            )
        return configs[0]

    def configs(self, **over: Any) -> tuple[ClusterConfig, ...]:
        """The configuration of each model; `over` has flags, too. Raises Misconfigured."""
        in_file, flags = read_file(self.file) if self.file is not None else {}, merge(self.flags, over)
        for one in self.further:
            flags = merge(flags, setting(one))
        if flags.get("model") or TABLE in flags:
            in_file = {name: value for name, value in in_file.items() if name not in ("model", TABLE)}
        return make_blaming(self.file, in_file, flags, _make)


def takes_settings(*paths: str, several: bool = False) -> Callable[[Verb], Verb]:
    """Makes a verb with --config, --set and a flag for the setting at each path. The verb is called with a
    GivenSettings and its other parameters. `several`: --model may be repeated."""

    def with_flags(verb: Verb) -> Verb:
        flags = {path.replace(".", "_"): path for path in paths}
        own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
        more: dict[str, tuple[Any, Any]] = {"file": (ConfigFile, None), "further": (Set, None)}
        if "pools.decode" in paths:
            more |= {"colocated": (Colocated, False), "workers": (Workers, None), "adapter": (Adapters, None)}

        def run(**values: Any) -> None:
            models = models_given(values.pop("model") or ()) if several and values.get("model") else {}
            given = _flags({path: values.pop(name, None) for name, path in flags.items()} | models)
            if adapters := values.pop("adapter", None):
                given = merge(given, table_of("worker.adapters", adapters_setting(adapters)))
            file, further = values.pop("file"), values.pop("further") or []
            colocated, workers = values.pop("colocated", False), values.pop("workers", None)
            if of_pools := pools(given.get("pools", {}), colocated, workers):
                given = merge(given, {"pools": of_pools})
            implied = None if colocated else workers
            verb(GivenSettings(file=file, further=further, flags=given, workers=implied), **values)

        kind = inspect.Parameter.KEYWORD_ONLY
        signature = [
            inspect.Parameter(
                name, kind, default=None, annotation=Models if several and path == "model" else _kind(path)
            )
            for name, path in flags.items()
        ]
        signature += [inspect.Parameter(name, kind, default=value, annotation=a) for name, (a, value) in more.items()]
        signature += [parameter.replace(kind=kind) for parameter in own]
        run.__doc__, run.__name__ = verb.__doc__, verb.__name__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # what typer reads
        return run

    return with_flags


def adapters_setting(given: Sequence[str]) -> str:
    """`worker.adapters` of NAME=PATH, paths made absolute: workers have other working directories. Raises
    Misconfigured."""
    for one in given:
        if "," in one:
            raise Misconfigured(f"--adapter {one}: write one NAME=PATH, without a comma in it", param="adapter")
    found = parse_adapters(", ".join(given), "--adapter")
    return ", ".join(f"{name}={path if HubName.of(path) else Path(path).absolute()}" for name, path in found.items())


def option(path: str) -> Any:
    """A setting's flag. The parameter is None if the flag is not given."""
    declared = declared_settings()[path].setting
    default = declared.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, float):
        default = number(default)
    suffix = f" Default: {default}." if default not in ("", None, MISSING) else ""
    name = "--" + (declared.flag or declared.name).replace("_", "-")
    is_number = declared.kind in (int, float)
    choices = [str(one) for one in get_args(declared.kind)] if get_origin(declared.kind) is Literal else []
    metavar = declared.unit.upper()
    if len("|".join(choices)) > MAX_METAVAR:
        metavar, suffix = "NAME", f"{suffix} One of {', '.join(choices)}."
    return typer.Option(
        f"{name}/--no-{name[2:]}" if declared.kind is bool else name,
        help=declared.help + suffix,
        metavar=metavar or None,
        envvar=declared.variable or None,
        show_envvar=bool(declared.variable),
        min=declared.least if is_number else None,
        max=declared.most if is_number else None,
    )


def _kind(path: str) -> Any:
    return Annotated[declared_settings()[path].setting.kind | None, option(path)]


def pools(apart: Mapping[str, Any], colocated: bool, workers: int | None) -> Table:
    """The [pools] table. Flags for one kind of cluster replace the other kind in the file."""
    if colocated or workers is not None:
        return {"prefill": 0, "decode": 0, **apart, "colocated": 1 if workers is None else workers}
    return {**apart, "colocated": 0} if apart.keys() & {"prefill", "decode"} else dict(apart)


def refuse_others(context: typer.Context, why: str, taken: Collection[str]) -> None:
    """Raises Misconfigured for flags that would have no effect."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in taken
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise Misconfigured(f"{why}: leave {', '.join(given)} out", param=given[0].lstrip("-"))


def _make(tables: Table) -> tuple[ClusterConfig, ...]:
    configs = make_configs(tables)
    for config in configs:
        check_names(config.router)
    return configs


def _flags(values: Mapping[str, Any]) -> Table:
    given: Table = {}
    for path, value in values.items():
        if value is not None:
            given = merge(given, table_of(path, value))
    return given
