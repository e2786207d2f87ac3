"""Every setting by its path in a file or `--set`, collected from the dataclasses that declare them."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from cluster.config.cluster_config import ClusterConfig
from protos.setting import Setting, settings_of

# Attributes shared by several parts: they are at the top of a file.
_AT_TOP = {
    "worker.model": "model",
    "worker.served_name": "served_name",
    "worker.lanes": "lanes",
    "router.host": "host",
    "router.port": "port",
    "router.grpc_port": "grpc_port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSetting:
    """`attribute` is its place in a ClusterConfig: worker.lanes.stall_s for the path lanes.stall_s."""

    path: str
    attribute: str
    setting: Setting

    @property
    def table(self) -> str:
        return self.path.rpartition(".")[0]

    def value(self, config: ClusterConfig) -> Any:
        found: Any = config
        for name in self.attribute.split("."):
            found = getattr(found, name)
        return found


@cache
def declared_settings() -> Mapping[str, DeclaredSetting]:
    """Settings by path: those at the top first, then table by table."""
    found = sorted(_walk(ClusterConfig, ""), key=lambda one: bool(one.table))
    by_table: dict[str, list[DeclaredSetting]] = {}
    for one in found:
        by_table.setdefault(one.table, []).append(one)
    return {one.path: one for table in by_table.values() for one in table}


@cache
def tables() -> tuple[str, ...]:
    """Names of tables in the order of a file: a table comes before its tables."""
    named = (one.table for one in declared_settings().values() if one.table)
    return tuple(dict.fromkeys(named))


def path_of(attribute: str) -> str:
    """The dataclass at an attribute of ClusterConfig, such as worker.lanes."""
    parts = attribute.split(".")
    for length in range(len(parts), 0, -1):
        if above := _AT_TOP.get(".".join(parts[:length])):
            return ".".join([above, *parts[length:]])
    return attribute


def config_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of the fields, of a dataclass or of a mapping's values."""
    kinds = typing.get_type_hints(config)
    return ((spec.name, kinds[spec.name]) for spec in fields(config))


def _walk(config: Any, above: str) -> Iterator[DeclaredSetting]:
    declared = settings_of(config)
    for name, kind in config_fields(config):
        attribute = f"{above}{name}"
        if name in declared:
            yield DeclaredSetting(path=path_of(attribute), attribute=attribute, setting=declared[name])
        elif is_dataclass(kind):
            yield from _walk(kind, f"{attribute}.")
