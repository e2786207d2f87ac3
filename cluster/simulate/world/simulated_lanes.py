"""The network between workers: every worker's card sends and receives at one rate; a lane can be slow, held up or cut.

InprocExchange.carry(parcel) ─▶ when both cards are free ─▶ bytes / rate ─▶ delay ─▶ deliver
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.simulate.latency.shapes import HOST_GPUS
from kvtransfer.lane_config import LaneConfig
from kvtransfer.transports.inproc import InprocExchange, InprocParcel
from protos.values import LaneAddress

STALL_S = 5.0
"""A lane without progress for this long is lost, as in `kvtransfer.lane_config.LaneConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The network cards of workers. Rates are bytes per second each way, of all cards of a worker together: `rates` by
    worker, else `rate`. Workers on one of `hosts`, by number, use the rate of its `links`. `delay_s` is the delay of a
    message. Each lane stages about `max_staged_bytes`, as in `kvtransfer.lane_config.LaneConfig`."""

    rate: float = 50e9
    rates: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    hosts: Mapping[str, int] = field(default_factory=dict)
    delay_s: float = 20e-6
    max_staged_bytes: int = LaneConfig().max_staged_bytes

    def share_host(self, source: str, destination: str) -> bool:
        host = self.hosts.get(source)
        return host is not None and host == self.hosts.get(destination)

    def rate_between(self, source: str, destination: str) -> float:
        """The rate of the slower end."""
        rates = self.links if self.share_host(source, destination) else self.rates
        return min(rates.get(source, self.rate), rates.get(destination, self.rate))


def hosts_of(num_gpus: Mapping[str, int]) -> dict[str, int]:
    """The host of each worker whose GPUs fit on one of `HOST_GPUS`. Pools alternate, so that a host has workers of
    both. A worker of several hosts shares none."""
    pools: dict[str, list[str]] = {}
    for worker in num_gpus:
        pools.setdefault(worker.rpartition("-")[0], []).append(worker)
    mixed = sorted(
        (place / len(workers), pool, worker) for pool, workers in pools.items() for place, worker in enumerate(workers)
    )
    found: dict[str, int] = {}
    free: list[int] = []  # free GPUs of each host so far
    for *_, worker in mixed:
        if (num := num_gpus[worker]) > HOST_GPUS:
            continue
        host = next((number for number, left in enumerate(free) if left >= num), len(free))
        if host == len(free):
            free.append(HOST_GPUS)
        free[host] -= num
        found[worker] = host
    return found


@dataclass(slots=True, eq=False)
class Condition:
    """The faults of the lane between two workers, for all their incarnations."""

    slowness: float = 1.0
    held: bool = False


@dataclass(slots=True, eq=False)
class Travel:
    """The transfer of a ticket's KV: when its first part was offered, and when its latest part arrived."""

    begun_s: float
    over_s: float

    def waited_s(self, since_s: float) -> float:
        """Seconds of the transfer after this time."""
        return max(0.0, self.over_s - max(since_s, self.begun_s))


class Lanes:
    """The lanes of all workers. `exchange` makes senders and receivers; all live on one event loop."""

    def __init__(self, cards: Cards) -> None:
        self._loop = asyncio.get_running_loop()
        self.exchange = InprocExchange(self._carry, max_staged_bytes=cards.max_staged_bytes, clock=self._loop.time)
        self.num_bytes = 0
        self._cards = cards
        self._sending: dict[str, float] = {}  # by worker: when its card is free again
        self._receiving: dict[str, float] = {}
        self._conditions: dict[tuple[str, str], Condition] = {}
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._travels: dict[str, dict[str, Travel]] = {}  # by job and ticket

    def condition(self, source: str, destination: str) -> Condition:
        return self._conditions.setdefault((source, destination), Condition())

    def hold(self, source: str, destination: str) -> None:
        """Nothing arrives until `let_go`."""
        self.condition(source, destination).held = True

    def let_go(self, source: str, destination: str) -> None:
        self.condition(source, destination).held = False
        for deliver in self._held.pop((source, destination), ()):
            deliver()

    def cut(self, source: LaneAddress, destination: LaneAddress) -> None:
        """Parcels under way are lost, and both ends are notified."""
        self._held.pop((source.worker_id, destination.worker_id), None)
        self.exchange.cut(source, destination, "the wire was cut")

    def take(self, job: str) -> Mapping[str, Travel]:
        """Returns and drops the travel of a job's KV, by ticket."""
        return self._travels.pop(job, {})

    def _carry(self, parcel: InprocParcel, deliver: Callable[[], None]) -> None:
        """Carries a parcel. Parcels of a lane arrive in the order they were offered: the cards take them one after the
        other."""
        pair = (_worker(parcel.source), _worker(parcel.destination))
        condition = self._conditions.get(pair)
        took_s = parcel.num_bytes / self._cards.rate_between(*pair) * (1.0 if condition is None else condition.slowness)
        source, destination = parcel.source, parcel.destination
        if self._cards.share_host(*pair):
            source, destination = f"{source} link", f"{destination} link"  # their network cards stay free
        begin_s = max(self._loop.time(), self._sending.get(source, 0.0), self._receiving.get(destination, 0.0))
        self._sending[source] = self._receiving[destination] = begin_s + took_s
        self.num_bytes += parcel.num_bytes
        travel = self._travel(parcel.chunk.ticket_id)
        self._loop.call_at(begin_s + took_s + self._cards.delay_s, self._arrive, pair, deliver, travel)

    def _travel(self, ticket_id: str) -> Travel:
        now, tickets = self._loop.time(), self._travels.setdefault(ticket_id.rpartition(".")[0], {})
        return tickets.setdefault(ticket_id, Travel(begun_s=now, over_s=now))

    def _arrive(self, pair: tuple[str, str], deliver: Callable[[], None], travel: Travel) -> None:
        travel.over_s = self._loop.time()
        condition = self._conditions.get(pair)
        if condition is not None and condition.held:
            self._held.setdefault(pair, []).append(deliver)
        else:
            deliver()


def _worker(peer: str) -> str:
    return peer.rpartition("#")[0]
