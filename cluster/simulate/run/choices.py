"""The clusters that a scenario compares: every combination of its numbers, or every cluster of at most N GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product, starmap

from cluster.config.cluster_config import MAX_WORKERS, ClusterConfig
from cluster.config.scenario import ClusterTable, Counts
from protos.errors import Misconfigured
from router.routing.registry import NAMES

MAX_CLUSTERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """With `prefill` 0 the `decode` workers are colocated. `tp`: GPUs of a worker whose pool has no own number."""

    prefill: int
    decode: int
    tp: int
    policy: str
    prefill_tp: int | None = None
    decode_tp: int | None = None

    @property
    def num_gpus(self) -> int:
        return self.prefill * (self.prefill_tp or self.tp) + self.decode * (self.decode_tp or self.tp)

    def __str__(self) -> str:
        if self.prefill_tp is not None or self.decode_tp is not None:
            prefill = f"{self.prefill}P tp{self.prefill_tp or self.tp}"
            return f"{prefill} + {self.decode}D tp{self.decode_tp or self.tp} {self.policy}"
        pools = f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.decode} colocated"
        return f"{pools} tp{self.tp} {self.policy}"


def choices(table: ClusterTable, settings: ClusterConfig) -> list[ClusterChoice]:
    """Returns the clusters of the table, smallest first. The settings give the numbers that the table does not have.

    Raises Misconfigured.
    """
    policies = _policies(settings.router.policy if table.policy is None else table.policy)
    ranks = _numbers("tp", _first(table.tp, settings.worker.tp), least=1)
    if table.max_gpus is not None:
        possible = _within(table.max_gpus, ranks, policies)
    else:
        possible = starmap(_choice, product(*_pools(table, settings), ranks, policies))
    every = list(islice(possible, MAX_CLUSTERS + 1))
    if len(every) > MAX_CLUSTERS:
        raise Misconfigured(
            f"cluster: too many clusters to compare: give fewer numbers, at most {MAX_CLUSTERS:,} combinations",
            param="cluster",
        )
    return sorted(dict.fromkeys(every), key=lambda choice: (choice.num_gpus, str(choice)))


def _pools(table: ClusterTable, settings: ClusterConfig) -> list[Sequence[int | None]]:
    pools = settings.pools
    colocated = pools.colocated if table.prefill is None and table.decode is None else 0
    if table.colocated is not None or colocated:
        return [[0], _numbers("colocated", _first(table.colocated, colocated), least=1), [None], [None]]
    own = [
        [None] if number is None and setting is None else _numbers(name, _first(number, setting), least=1)
        for name, number, setting in (
            ("prefill_tp", table.prefill_tp, pools.prefill_tp),
            ("decode_tp", table.decode_tp, pools.decode_tp),
        )
    ]
    num_prefill = _numbers("prefill", _first(table.prefill, pools.prefill))
    return [num_prefill, _numbers("decode", _first(table.decode, pools.decode), least=1), *own]


def _choice(
    prefill: int, decode: int, prefill_tp: int | None, decode_tp: int | None, tp: int, policy: str
) -> ClusterChoice:
    own = {"prefill_tp": prefill_tp, "decode_tp": decode_tp} if prefill else {}
    return ClusterChoice(prefill=prefill, decode=decode, tp=tp, policy=policy, **own)


def _first(*values: Counts | None) -> Counts:
    return next((value for value in values if value is not None), 1)


def _numbers(name: str, value: Counts, *, least: int = 0) -> list[int]:
    """Parses 2, [1, 2, 4] or "1:4". Raises Misconfigured."""
    numbers: Sequence[int] = ()
    if isinstance(value, str):
        if bounds := re.fullmatch(r"(\d{1,4}):(\d{1,4})", value):
            numbers = range(int(bounds[1]), int(bounds[2]) + 1)
    else:
        numbers = [value] if isinstance(value, int) else value
    if not numbers or min(numbers) < least or max(numbers) > MAX_WORKERS:
        raise Misconfigured(
            f'cluster.{name} = {value!r}: give numbers from {least} to {MAX_WORKERS}, as 2, [1, 2, 4] or "1:4"',
            param=f"cluster.{name}",
        )
    return list(dict.fromkeys(numbers))


def _policies(policies: str | Sequence[str]) -> list[str]:
    names = [policies] if isinstance(policies, str) else policies
    for name in names or [""]:
        if name not in NAMES:
            raise Misconfigured(
                f"cluster.policy: there is no policy {name!r}: choose of {', '.join(NAMES)}", param="cluster.policy"
            )
    return list(dict.fromkeys(names))


def _within(gpus: int, ranks: Sequence[int], policies: Sequence[str]) -> Iterator[ClusterChoice]:
    if gpus < min(ranks):
        raise Misconfigured(
            f"cluster.max_gpus = {gpus}: a worker needs cluster.tp = {min(ranks)}: give as many or more",
            param="cluster.max_gpus",
        )
    for tp in ranks:
        for num_prefill in range(gpus // tp):
            for num_decode in range(1, gpus // tp - num_prefill + 1):
                for policy in policies:
                    yield ClusterChoice(prefill=num_prefill, decode=num_decode, tp=tp, policy=policy)
