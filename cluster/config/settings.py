"""From a TOML file and flags to a ClusterConfig. Whatever is misspelled, misplaced or of a wrong type is named.

file (TOML) ─┐
flags ───────┴─ merged, flags win ─▶ tables ─▶ dataclasses, which check the ranges
"""

from __future__ import annotations

import json
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from cluster.config.config import ClusterConfig, PoolsConfig, RayConfig, SupervisionConfig
from decode_pool.config import DecodeConfig
from kvtransfer.config import LaneConfig
from prefill_pool.config import PrefillConfig
from protos.errors import Misconfigured
from protos.hints import nearest, unusable
from protos.tls import FaceTls, PeerTls
from protos.values import WorkerRole
from router.config import RouterConfig
from workers.config import WorkerConfig

Table = dict[str, Any]

TABLES: Mapping[str, type[Any]] = {
    "pools": PoolsConfig,
    "worker": WorkerConfig,
    "lanes": LaneConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
    "ray": RayConfig,
    "supervision": SupervisionConfig,
    "tls": FaceTls,
    "peers": PeerTls,
}
# At the top of the file, outside every table: they concern more than one part.
TOP: Mapping[str, Any] = {
    "model": str, "served_name": str, "host": str, "port": int, "grpc_port": int, "index": str, "discovery": str,
    "processes": int,
}  # fmt: skip
_ELSEWHERE = {
    "worker": {"model", "served_name", "lanes"},
    "router": {"model_path", "model_name", "host", "port", "grpc_port"},
}
_MAX_FLOAT = int(sys.float_info.max)
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read_file(path: Path) -> Table:
    """The tables of a TOML file. Raises Misconfigured when it cannot be read, with the line of a syntax error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"--config {path}: {unusable(error)}", param="config") from error
    except ValueError as error:
        raise Misconfigured(
            f"--config {path} is not TOML: {error}; `baton config` prints one that is", param="config"
        ) from error


def setting(text: str) -> Table:
    """The tables of `--set worker.prefill_chunk=256`: the value as in TOML, or a bare word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Misconfigured(f"--set {text}: write it as NAME=VALUE, such as worker.prefill_chunk=256", param="set")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except ValueError:  # a bare word, or a number of more digits than Python reads
        parsed = value
    for part in reversed(name.strip().split(".")):
        parsed = {part: parsed}
    return dict(parsed)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Both, table by table; where both say something, `over` is right. What stands where a table belongs stays there,
    for `make_config` to refuse."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name, {})
        if not isinstance(value, Mapping):
            merged[name] = value
        elif isinstance(below, Mapping):
            merged[name] = merge(below, value)
    return merged


def make_config(settings: Mapping[str, Any]) -> ClusterConfig:
    """Raises Misconfigured, naming the setting, with its table, and how to mend it."""
    top = {name: _checked(name, value, TOP[name]) for name, value in settings.items() if _is_top(name)}
    tables = {name: _table(name, settings.get(name, {})) for name in TABLES}
    model = top.get("model", "")
    lanes = _part("lanes", tables)
    worker = _part("worker", tables, model=model, served_name=top.get("served_name", ""), lanes=lanes)
    faces = {name: top[name] for name in ("host", "port", "grpc_port") if name in top}
    if faces.get("port") == 0:
        faces.setdefault("grpc_port", 0)  # whoever takes any free port does not want a certain one beside it
    if top.get("served_name") == "":
        raise Misconfigured(
            "served_name is '': give what clients call the model, or leave it out for its folder's name",
            param="served_name",
        )
    name = worker.served_name or Path(model).resolve().name
    return ClusterConfig(
        worker=worker,
        router=_part("router", tables, model_path=Path(model), model_name=name, **faces),
        **{table: _part(table, tables) for table in TABLES if table not in ("worker", "lanes", "router")},
        **{name: top[name] for name in ("index", "discovery", "processes") if name in top},
    )


def make_blaming(file: Path | None, said: Table, over: Table, make: Callable[[Table], ClusterConfig]) -> ClusterConfig:
    """What `make` makes of a file's tables with flags above them. A mistake that the flags alone do not make is raised
    as one of the file, or of both where it takes both."""
    try:
        return make(merge(said, over))
    except Misconfigured as error:
        if file is None or _makes(over, error, make):
            raise
        where = f"--config {file}" if _makes(said, error, make) else f"--config {file} with the flags above it"
        raise type(error)(f"{where}: {error.message}", param=error.param) from error


def _makes(tables: Table, mistake: Misconfigured, make: Callable[[Table], ClusterConfig]) -> bool:
    """Whether these tables alone are refused with the same words; that a model is missing is no matter."""
    try:
        make(tables if mistake.param == "model" else {"model": "m", **tables})
    except Misconfigured as error:
        return error.message == mistake.message
    return False


def _part(table: str, tables: Mapping[str, Table], **more: Any) -> Any:
    """What a table makes. A mistake is told with the table's name."""
    try:
        return TABLES[table](**more, **tables[table])
    except Misconfigured as error:
        name = (error.param or "").removeprefix(f"{table}.")
        if name not in _owned(table):
            raise
        told = error.message if error.message.startswith((f"{table}.", f"{table}: ")) else f"{table}.{error.message}"
        raise type(error)(told, param=f"{table}.{name}") from error


def to_toml(config: ClusterConfig) -> str:
    """The configuration as a file that `--config` reads; settings left to be found out at the start are comments."""
    lines = [
        f"model = {_literal(config.worker.model)}",
        *(_line(config.router, "model_name", "served_name"), *(_line(config.router, n) for n in ("host", "port"))),
        *(_line(config.router, "grpc_port"), _line(config, "index"), _line(config, "discovery")),
        _line(config, "processes"),
    ]
    lines += ["", "[pools]", *(f"{role} = {config.pools.counts().get(role, 0)}" for role in WorkerRole)]
    lines += [_line(config.pools, name) for name in ("prefill_tp", "decode_tp")]
    for table, cls in TABLES.items():
        if table == "pools":
            continue
        part = getattr(config, table)
        owned = [spec.name for spec in fields(cls) if spec.name not in _ELSEWHERE.get(table, ())]
        lines += ["", f"[{table}]", *(_line(part, name) for name in owned)]
    return "\n".join(lines) + "\n"


def _line(part: object, name: str, called: str = "") -> str:
    value = getattr(part, name)
    return f"# {called or name} is found out" if value is None else f"{called or name} = {_literal(value)}"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # which alone TOML escapes besides


def _is_top(name: str) -> bool:
    """Whether a name at the top is a setting, not a table. Raises Misconfigured when it is neither."""
    if name in TABLES:
        return False
    if name in TOP:
        return True
    home = next((table for table in TABLES if name in _owned(table)), None)
    hint = f"it belongs into [{home}]" if home else _suggestion(name, [*TOP, *TABLES])
    raise Misconfigured(f"there is no setting {name!r} at the top: {hint}", param=name)


def _owned(table: str) -> dict[str, Any]:
    """The settings of a table and their types."""
    hints = typing.get_type_hints(TABLES[table])
    return {name: hint for name, hint in hints.items() if name not in _ELSEWHERE.get(table, ())}


def _table(table: str, given: Any) -> Table:
    if not isinstance(given, Mapping):
        raise Misconfigured(f"{table} = {given!r}: it is a table, write [{table}] and settings below it", param=table)
    owned = _owned(table)
    for name in given:
        if name not in owned:
            hint = "it belongs to the top, outside every table" if name in TOP else _suggestion(name, list(owned))
            raise Misconfigured(f"there is no setting {name!r} in [{table}]: {hint}", param=f"{table}.{name}")
    return {name: _checked(f"{table}.{name}", value, owned[name]) for name, value in given.items()}


def _suggestion(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(sorted(known))}"


def _checked(name: str, value: Any, wanted: Any) -> Any:
    """The value as `wanted` (a type, a Literal, or one of them or None). Raises Misconfigured."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        (wanted,) = (option for option in typing.get_args(wanted) if option is not types.NoneType)
    if typing.get_origin(wanted) is Literal:
        options = typing.get_args(wanted)
        if value in options:
            return value
        near = nearest(str(value), options)
        hint = f"did you mean {near!r}?" if near else f"choose one of {', '.join(options)}"
        raise Misconfigured(f"{name} = {value!r}: {hint}", param=name)
    if wanted is float and type(value) is int and abs(value) <= _MAX_FLOAT:
        return float(value)
    if type(value) is wanted:
        return value
    raise Misconfigured(f"{name} = {_shown(value)}: give {_WORDS[wanted]}", param=name)


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_FLOAT:  # perhaps of more digits than Python writes
        return "a number beyond all ranges"
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:77]}..."
