"""Several models of one deployment: `--model a=PATH --model b=PATH`, or tables [models.NAME] of a file.

settings at the top ─┬─ [models.a] over them ─▶ ClusterConfig of a, the first: address, tenants, ledger of all
                     └─ [models.b] over them ─▶ ClusterConfig of b
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config.cluster_config import ClusterConfig
from cluster.config.settings import Table, make_config, merge, paths_of
from protos.errors import Misconfigured

TABLE = "models"
OF_EACH = (
    "model", "served_name", "fleet", "discovery", "pools", "worker", "planner", "lanes",
    "router.policy", "router.shadow_policy", "router.ttft_ms", "router.tpot_ms", "router.local_prefill_tokens",
    "router.model_aliases", "router.text", "router.admission", "router.dispatch", "router.fleet",
)  # fmt: skip
"""Settings and tables that a model may have of its own. The others are of the address, and the same for all."""
_NAMED = re.compile(r"([^=\s]+)=(.+)")


def models_given(given: Sequence[str]) -> Table:
    """The tables of --model, repeated or not: PATH, or NAME=PATH for each of several. Raises Misconfigured."""
    found = [(one, None if Path(one).exists() else _NAMED.fullmatch(one)) for one in given]
    if len(found) == 1:
        [(path, named)] = found
        return {"model": path} if named is None else {"model": named[2], "served_name": named[1]}
    models: Table = {}
    for one, named in found:
        if named is None:
            raise Misconfigured(
                f"--model {one}: of several models each has a name: write --model NAME={one}", param="model"
            )
        if named[1] in models:
            first = f"{named[1]}={models[named[1]]['model']}"
            raise Misconfigured(
                f"--model {one}: {named[1]!r} is the name of --model {first}, too: give each model a name of its own",
                param="model",
            )
        models[named[1]] = {"model": named[2]}
    return {TABLE: models}


def make_configs(settings: Mapping[str, Any]) -> tuple[ClusterConfig, ...]:
    """One configuration, or one for each table [models.NAME], in their order. Raises Misconfigured."""
    tables = settings.get(TABLE)
    if tables is None:
        return (make_config(settings),)
    if not isinstance(tables, Mapping) or not tables or not all(isinstance(one, Mapping) for one in tables.values()):
        raise Misconfigured(f"{TABLE}: write a table [{TABLE}.NAME] for each model", param=TABLE)
    shared = {name: value for name, value in settings.items() if name != TABLE}
    for name in ("model", "served_name", "fleet"):
        if shared.get(name):
            raise Misconfigured(
                f"{name} = {shared[name]!r} beside [{TABLE}.{next(iter(tables))}]: write it into its model's table",
                param=name,
            )
    configs = tuple(_of_model(name, table, shared) for name, table in tables.items())
    for what, values in (
        ("served_name", [one.router.model_name for one in configs]),
        ("fleet", [one.fleet for one in configs]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise Misconfigured(f"two models have the {what} {twice!r}: give each its own", param=what)
    return configs


def _of_model(name: str, table: Mapping[str, Any], shared: Table) -> ClusterConfig:
    for path, _ in paths_of(table):
        if not any(path == allowed or path.startswith(f"{allowed}.") for allowed in OF_EACH):
            raise Misconfigured(
                f"[{TABLE}.{name}] has {path}: a model has settings of its own in {', '.join(OF_EACH)}; the others go "
                "to the top, for all models",
                param=path,
            )
    if not table.get("model"):
        raise Misconfigured(f"[{TABLE}.{name}] has no model: write its path there", param="model")
    own = {"served_name": name, "fleet": fleet_of(name)} | dict(table)
    try:
        return make_config(merge(shared, own))
    except Misconfigured as error:
        raise type(error)(f"[{TABLE}.{name}]: {error.message}", param=error.param) from error


def fleet_of(name: str) -> str:
    """The fleet's name for a model, reduced to characters allowed in a worker's id and a key of Redis."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "model"
