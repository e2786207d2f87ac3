"""Makes a ClusterConfig from a TOML file and flags. Errors name a setting that is misspelled, misplaced or of a wrong
type.

file (TOML) ─┐
flags ───────┴─ merged, flags win ─▶ tables ─▶ dataclasses, which check the ranges
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.config.cluster_config import ClusterConfig
from cluster.config.declared import config_fields, declared_settings, path_of, tables
from protos.errors import Misconfigured
from protos.hints import suggested, unusable
from protos.model_files.opening import model_name
from protos.setting import Setting, settings_of
from protos.values import WorkerRole

Table = dict[str, Any]
Made = TypeVar("Made")

_MAX_FLOAT = int(sys.float_info.max)
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read_file(path: Path) -> Table:
    """The tables of a file of settings. Raises Misconfigured."""
    return read_toml(path, "--config", "config", "; `baton config` prints one that is")


def read_toml(path: Path, given: str, param: str, hint: str = "") -> Table:
    """The tables of a TOML file. Raises Misconfigured if it cannot be read, with the line of a syntax error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"{given} {path}: {unusable(error)}", param=param) from error
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"{given} {path} is not TOML: {error}{hint}", param=param) from error


def setting(text: str) -> Table:
    """The tables of `--set worker.prefill_chunk=256`. The value is TOML or a bare word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Misconfigured(f"--set {text}: write it as NAME=VALUE, such as worker.prefill_chunk=256", param="set")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except ValueError:  # a bare word, or a number of more digits than Python reads
        parsed = value
    return table_of(name.strip(), parsed)


def table_of(path: str, value: Any) -> Table:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Merges tables; values of `over` win. A value in place of a table is kept, so that `make_config` refuses it."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name, {})
        if not isinstance(value, Mapping):
            merged[name] = value
        elif isinstance(below, Mapping):
            merged[name] = merge(below, value)
    return merged


def make_config(settings: Mapping[str, Any]) -> ClusterConfig:
    """Raises Misconfigured, which names the setting by its path and the fix."""
    given = dict(_checked(settings))
    if isinstance(port := given.get("port"), int):  # clusters on one machine differ by their port alone
        given.setdefault("grpc_port", port + 1 if 0 < port < 65535 else 0)
    if given.get("served_name") == "":
        raise Misconfigured(
            "served_name = '': give what clients call the model, or leave it out for its folder's name",
            param="served_name",
        )
    model = Path(given.setdefault("model", ""))
    given |= {"router.model_path": model, "router.model_name": given.get("served_name") or model_name(model)}
    made: ClusterConfig = _make(ClusterConfig, "", given)
    return made


def _make(config: Any, above: str, given: Mapping[str, Any]) -> Any:
    """Makes a dataclass of settings and those nested in it. Errors have the path of the setting."""
    values: dict[str, Any] = {}
    for name, kind in config_fields(config):
        path = path_of(f"{above}{name}")
        if is_dataclass(kind):
            values[name] = _make(kind, f"{above}{name}.", given)
        elif path in given:
            values[name] = given[path]
    try:
        return config(**values)
    except Misconfigured as error:
        table = path_of(above.rstrip("."))
        name = (error.param or "").removeprefix(f"{table}.")
        path = path_of(f"{above}{name}")
        if (
            path == name
            or name not in settings_of(config)
            or error.message.startswith((f"{table}.", f"{table}: ", "--"))
        ):
            raise
        raise type(error)(f"{table}.{error.message}", param=path) from error


def make_blaming(file: Path | None, in_file: Table, over: Table, make: Callable[[Table], Made]) -> Made:
    """Calls `make` with a file's tables and flags merged. An error that the flags alone do not cause is blamed on the
    file, or on both if neither causes it alone."""
    try:
        return make(merge(in_file, over))
    except Misconfigured as error:
        if file is None or _makes(over, error, make):
            raise
        where = f"--config {file}" if _makes(in_file, error, make) else f"--config {file} with the flags above it"
        raise type(error)(f"{where}: {error.message}", param=error.param) from error


def _makes(tables: Table, mistake: Misconfigured, make: Callable[[Table], object]) -> bool:
    """Whether these tables alone fail with the same message, apart from a missing model."""
    try:
        make(tables if mistake.param == "model" else {"model": "m", **tables})
    except Misconfigured as error:
        return error.message == mistake.message
    return False


def to_toml(config: ClusterConfig) -> str:
    """The configuration as a file that `--config` reads. Settings that are derived at the start are comments."""
    counts = {role.value: config.pools.counts().get(role, 0) for role in WorkerRole}
    config = replace(
        config,
        worker=replace(config.worker, served_name=config.router.model_name),
        pools=replace(config.pools, **counts),
    )
    lines, table = [], ""
    for path, declared in declared_settings().items():
        if declared.table != table:
            table = declared.table
            lines += ["", f"[{table}]"]
        name, value = path.rpartition(".")[2], declared.value(config)
        lines.append(f"# {name} is found out" if value is None else f"{name} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # the only other character that TOML escapes


def paths_of(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _checked(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by path. Raises Misconfigured for an unknown name or a value of a wrong type."""
    known = declared_settings()
    for path, value in _leaves(settings, ""):
        if path not in known:
            raise Misconfigured(_unknown(path), param=path)
        yield path, _typed(path, value, known[path].setting)


def checked_value(path: str, value: Any) -> Any:
    """The value of an existing setting; None for its default. Raises Misconfigured for a wrong type."""
    if value is None and declared_settings()[path].setting.default is None:
        return None
    return _typed(path, value, declared_settings()[path].setting)


def _leaves(settings: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Like `paths_of`, but searches tables only where a table belongs. Raises Misconfigured if there is a value
    instead."""
    for name, value in settings.items():
        path = f"{above}{name}"
        if any(f"{table}.".startswith(f"{path}.") for table in tables()):
            if not isinstance(value, Mapping):
                raise Misconfigured(
                    f"{path} = {value!r}: it is a table, write [{path}] and settings below it", param=path
                )
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _unknown(path: str) -> str:
    """The error for a path that is no setting: the nearest name, or the names there are."""
    table, _, name = path.rpartition(".")
    where = f"in [{table}]" if table else "at the top"
    above = f"{table}." if table else ""
    siblings = {one.removeprefix(above).partition(".")[0] for one in declared_settings() if one.startswith(above)}
    homes = [one.table for one in declared_settings().values() if one.path.rpartition(".")[2] == name]
    if homes:
        places = " or ".join(f"into [{home}]" if home else "to the top, outside every table" for home in homes)
        hint = f"it belongs {places}"
    else:
        hint = suggested(name, siblings)
    return f"there is no setting {name!r} {where}: {hint}"


def _typed(path: str, value: Any, declared: Setting) -> Any:
    """Raises Misconfigured."""
    wanted = str if declared.choices else declared.kind
    if wanted is float and type(value) is int and abs(value) <= _MAX_FLOAT:
        return float(value)
    if type(value) is wanted:
        return value
    raise Misconfigured(f"{path} = {_shown(value)}: give {_WORDS[wanted]}", param=path)


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_FLOAT:  # may have more digits than Python prints
        return "a number beyond all ranges"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
