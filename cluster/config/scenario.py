"""A scenario of `baton simulate` and `baton bench`: a TOML file's tables as one value.

`cluster/simulate/cli/keys.toml` describes every key; `baton simulate --keys` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cluster.config.settings import Table, merge, read_toml, setting
from protos.errors import Misconfigured
from protos.hints import suggested

Counts = int | str | list[int]
"""One number, several, or a range such as "0:3"."""
Share = Annotated[float, Meta(ge=0, le=1)]
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[cluster]`. A key that is missing comes from the settings of `baton serve`."""

    prefill: Counts | None = None
    decode: Counts | None = None
    colocated: Counts | None = None
    max_gpus: Annotated[int, Meta(ge=1, le=1024)] | None = None
    tp: Counts | None = None
    prefill_tp: Counts | None = None
    decode_tp: Counts | None = None
    policy: str | list[str] | None = None
    gateways: Annotated[int, Meta(ge=1, le=1000)] = 1
    autoscale: str = ""


class HardwareTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: str = "h100"
    model: str = "llama-3-8b"
    dtype: str | None = None
    lane_gbps: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    usd_per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    acceptance: list[Share] = []


class WorkloadTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "poisson"
    requests: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    rate: Annotated[float, Meta(gt=0, le=1e9)] = 4.0
    input_len: int | str = "200:4000"
    output_len: int | str = "20:400"
    trace: str = ""
    trace_scale: Factor = 1.0
    trace_speed: Factor = 1.0


class FaultsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schedule: list[str] = []
    random: Annotated[int, Meta(ge=0, le=100_000)] = 0
    audit_every: Annotated[int, Meta(ge=0)] = 0


class ObjectivesTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    attainment: Share = 0.95
    targets: list[str] = []


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`config` is a settings file of `baton serve`; `settings` has tables of settings, which win."""

    seed: Annotated[int, Meta(ge=0)] = 0
    config: str = ""
    cluster: ClusterTable = ClusterTable()
    hardware: HardwareTable = HardwareTable()
    workload: WorkloadTable = WorkloadTable()
    faults: FaultsTable = FaultsTable()
    objectives: ObjectivesTable = ObjectivesTable()
    settings: dict[str, Any] = {}


_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "a table",
}  # fmt: skip


def read_scenario(path: Path | None, changes: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with `changes` such as workload.rate=12. Raises Misconfigured."""
    return scenario_of(read_tables(path, changes))


def read_tables(path: Path | None, changes: Sequence[str]) -> Table:
    """Raises Misconfigured."""
    tables = read_toml(path, "scenario", "scenario") if path is not None else {}
    for text in changes:
        tables = merge(tables, setting(text))
    return tables


def scenario_of(tables: Table) -> Scenario:
    """Raises Misconfigured."""
    try:
        scenario = msgspec.convert(tables, Scenario)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), tables) from None
    _check(scenario, tables)
    return scenario


def _mistake(error: str, tables: Mapping[str, Any]) -> Misconfigured:
    """Names the key, its value and what is allowed. `found` is as "Expected `int` >= 1 - at `$.workload.requests`"."""
    problem, _, place = error.partition(" - at `$.")
    keys = re.findall(r"\w+", place)
    value: Any = tables
    for key in keys:
        value = value[int(key) if isinstance(value, list) else key]
    path = place.rstrip("`")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        names = getattr(Scenario(), path).__struct_fields__ if path else Scenario.__struct_fields__
        name = f"{path}.{unknown[1]}".lstrip(".")
        return Misconfigured(f"there is no key {name}: {suggested(unknown[1], names)}", param=name)
    allowed = problem.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    allowed = re.sub(r"\b(int|float|str|bool|array|object)\b", lambda word: _WORDS[word[0]], allowed)
    return Misconfigured(f"{path} = {value!r}: give {allowed}; `baton simulate --keys` describes it", param=path)


def _check(scenario: Scenario, tables: Mapping[str, Any]) -> None:
    """Raises Misconfigured for keys that contradict each other, or would have no effect."""
    cluster, workload = scenario.cluster, scenario.workload
    defaults = {"cluster": ClusterTable(), "workload": WorkloadTable()}

    def refuse(table: str, why: str, names: Sequence[str]) -> None:
        values = tables.get(table, {})
        needless = [name for name in names if values.get(name) not in (None, getattr(defaults[table], name))]
        if needless:
            present = ", ".join(f"{table}.{name}" for name in needless)
            raise Misconfigured(f"{table}: {why}: leave {present} out", param=f"{table}.{needless[0]}")

    of_pools = ("prefill", "decode", "prefill_tp", "decode_tp")
    if cluster.max_gpus is not None:
        refuse("cluster", "max_gpus tries every number of workers", (*of_pools, "colocated"))
    if cluster.colocated is not None:
        refuse("cluster", "colocated workers are instead of two pools", of_pools)
    lengths = ("input_len", "output_len")
    if workload.trace:
        refuse("workload", "trace has the requests and their times", ("name", "rate", *lengths))
    else:
        refuse("workload", "no trace is given", ("trace_scale", "trace_speed"))
    if workload.name == "assistant":
        refuse("workload", "assistant has its own lengths", lengths)
