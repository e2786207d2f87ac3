"""What goes wrong in a simulated cluster, and when: written down by somebody, or drawn from a seed.

A fault is text: `AT KIND TARGET [for SECONDS] [by AMOUNT]`, such as `12.5 kill decode-0`, `3 pause prefill-1 for 4` or
`5 lane-slow prefill-0>decode-1 for 10 by 50`. A schedule that broke something can be typed in again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from protos.errors import Misconfigured


class Kind(StrEnum):
    """Of a worker, of a lane (`source>destination`), of a worker's KV events, of a gateway (by place), of what gateways
    share (`redis`), of clients."""

    KILL = "kill"
    PAUSE = "pause"
    SLOW = "slow"
    RESET = "reset"  # its connections to gateways
    DRAIN = "drain"  # takes nothing new, ends when all has ended or moved, and is started again
    CLOCK_SKEW = "clock-skew"  # its clock jumps so many seconds ahead
    LANE_STALL = "lane-stall"
    LANE_CUT = "lane-cut"
    LANE_SLOW = "lane-slow"
    EVENTS_DROP = "events-drop"
    EVENTS_DELAY = "events-delay"
    EVENTS_DOUBLE = "events-double"
    EVENTS_SWAP = "events-swap"
    INDEX_LOST = "index-lost"
    GATEWAY_RESTART = "gateway-restart"
    STORE_AWAY = "store-away"  # no gateway reaches the Redis of the shared index
    STORE_LOST = "store-lost"  # it ends, and is empty when it comes back
    ABORTS = "aborts"


OF_WORKERS = (Kind.KILL, Kind.PAUSE, Kind.SLOW, Kind.RESET, Kind.DRAIN, Kind.CLOCK_SKEW)
OF_LANES = (Kind.LANE_STALL, Kind.LANE_CUT, Kind.LANE_SLOW)
OF_STORES = (Kind.STORE_AWAY, Kind.STORE_LOST)
OF_EVENTS = (Kind.EVENTS_DROP, Kind.EVENTS_DELAY, Kind.EVENTS_DOUBLE, Kind.EVENTS_SWAP)
STORE = "redis"
_TEXT = re.compile(
    r"(?P<at>{n}) (?P<kind>[a-z-]+) (?P<target>\S+)( for (?P<for>{n}))?( by (?P<by>{n}))?".format(n=r"\d+(?:\.\d*)?")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`amount`: how many times slower, the share of clients that leave, or the seconds that a clock jumps."""

    at_s: float
    kind: Kind
    target: str
    duration_s: float = 1.0
    amount: float = 10.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises Misconfigured."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or found["kind"] not in set(Kind):
            raise Misconfigured(
                f"--fault {text!r}: write it as 'AT KIND TARGET [for SECONDS] [by AMOUNT]', KIND one of "
                f"{', '.join(Kind)}",
                param="fault",
            )
        return cls(
            at_s=float(found["at"]),
            kind=Kind(found["kind"]),
            target=found["target"],
            duration_s=float(found["for"] or 1.0),
            amount=float(found["by"] or 10.0),
        )

    def __str__(self) -> str:
        return f"{self.at_s:g} {self.kind} {self.target} for {self.duration_s:g} by {self.amount:g}"


def drawn(
    num: int, *, seed: int, workers: Sequence[str], num_gateways: int, until_s: float, with_store: bool = False
) -> list[Fault]:
    """`num` faults of any kind at any time before `until_s`."""
    rng = random.Random(f"{seed} faults")
    kinds = [kind for kind in Kind if with_store or kind not in OF_STORES]
    lanes = [f"{source}>{destination}" for source, destination in product(workers, workers) if source != destination]
    faults = []
    for _ in range(num):
        kind = rng.choice(kinds)
        if kind in OF_WORKERS or kind in OF_EVENTS:
            target = rng.choice(workers)
        elif kind in OF_LANES and lanes:
            target = rng.choice(lanes)
        elif kind in (Kind.GATEWAY_RESTART, Kind.INDEX_LOST):
            target = str(rng.randrange(num_gateways))
        elif kind in OF_STORES:
            target = STORE
        else:
            kind, target = Kind.ABORTS, "clients"
        faults.append(
            Fault(
                at_s=round(rng.uniform(0.0, until_s), 3),
                kind=kind,
                target=target,
                duration_s=round(rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5), 3),
                amount=round(rng.uniform(0.1, 1.0) if kind is Kind.ABORTS else rng.uniform(2.0, 50.0), 2),
            )
        )
    return sorted(faults, key=lambda fault: (fault.at_s, str(fault)))
