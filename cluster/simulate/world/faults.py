"""The faults of a simulated cluster: a schedule, or faults drawn from a seed.

A fault is text: `AT KIND TARGET [for SECONDS] [by AMOUNT]`, such as `12.5 kill decode-0`, `3 pause prefill-1 for 4` or
`5 lane-slow prefill-0>decode-1 for 10 by 50`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from cluster.simulate.world.clock import MAX_SPAN_S
from protos.errors import Misconfigured


class Kind(StrEnum):
    """By target: a worker, a lane (`source>destination`), a worker's KV events, a gateway, `redis`, clients."""

    KILL = "kill"
    PAUSE = "pause"
    SLOW = "slow"
    RESET = "reset"  # the worker's connections to gateways
    DRAIN = "drain"  # the worker takes no new work, ends when all requests have ended or migrated, and is started again
    CLOCK_SKEW = "clock-skew"  # the worker's clock jumps this many seconds ahead
    LANE_STALL = "lane-stall"
    LANE_CUT = "lane-cut"
    LANE_SLOW = "lane-slow"
    EVENTS_DROP = "events-drop"
    EVENTS_DELAY = "events-delay"
    EVENTS_DOUBLE = "events-double"
    EVENTS_SWAP = "events-swap"
    INDEX_LOST = "index-lost"
    GATEWAY_RESTART = "gateway-restart"
    STORE_AWAY = "store-away"  # no gateway can reach the Redis of the shared index
    STORE_LOST = "store-lost"  # Redis ends, and is empty when it comes back
    ABORTS = "aborts"


OF_WORKERS = (Kind.KILL, Kind.PAUSE, Kind.SLOW, Kind.RESET, Kind.DRAIN, Kind.CLOCK_SKEW)
OF_LANES = (Kind.LANE_STALL, Kind.LANE_CUT, Kind.LANE_SLOW)
OF_STORES = (Kind.STORE_AWAY, Kind.STORE_LOST)
OF_EVENTS = (Kind.EVENTS_DROP, Kind.EVENTS_DELAY, Kind.EVENTS_DOUBLE, Kind.EVENTS_SWAP)
LASTING = (Kind.PAUSE, Kind.SLOW, Kind.LANE_STALL, Kind.LANE_SLOW, *OF_EVENTS, *OF_STORES)
MEASURED = (Kind.SLOW, Kind.LANE_SLOW, Kind.ABORTS, Kind.CLOCK_SKEW)
STORE = "redis"
CLIENTS = "clients"
DURATION_S, AMOUNT = 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`amount`: the factor of a slowdown, the share of clients that leave, or the seconds of a clock's jump."""

    at_s: float
    kind: Kind
    target: str
    duration_s: float = DURATION_S
    amount: float = AMOUNT

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises Misconfigured."""
        parsed = _TEXT.fullmatch(" ".join(text.split()))
        if parsed is None or parsed["kind"] not in set(Kind):
            raise _unread(text, f"kinds are {', '.join(Kind)}")
        kind, lasts, amount = Kind(parsed["kind"]), parsed["lasts"], parsed["amount"]
        for name, number, kinds in (("for", lasts, LASTING), ("by", amount, MEASURED)):
            if number is not None and kind not in kinds:
                raise _unread(text, f"{kind} has no {name!r}, leave it out: those that have are {', '.join(kinds)}")
        fault = cls(
            at_s=float(parsed["at"]),
            kind=kind,
            target=parsed["target"],
            duration_s=DURATION_S if lasts is None else float(lasts),
            amount=(1.0 if kind is Kind.ABORTS else AMOUNT) if amount is None else float(amount),
        )
        if not 0 < fault.duration_s <= MAX_SPAN_S:
            raise _unread(text, f"'for' takes seconds above 0, at most {MAX_SPAN_S:,.0f}")
        if kind is Kind.ABORTS and not 0 < fault.amount <= 1:
            raise _unread(text, "'by' is the share of clients that leave, above 0 and at most 1")
        if kind in (Kind.SLOW, Kind.LANE_SLOW) and fault.amount < 1:
            raise _unread(text, "'by' is how many times slower, at least 1")
        return fault

    @property
    def what(self) -> str:
        """The fault without its time."""
        lasts = f" for {self.duration_s:.10g}" if self.kind in LASTING else ""
        return f"{self.kind} {self.target}{lasts}{f' by {self.amount:.10g}' if self.kind in MEASURED else ''}"

    def __str__(self) -> str:
        return f"{self.at_s:.10g} {self.what}"


_NUMBER = r"\d+(?:\.\d*)?"
_TEXT = re.compile(
    rf"(?P<at>{_NUMBER}) (?P<kind>\S+) (?P<target>\S+)(?: for (?P<lasts>{_NUMBER}))?(?: by (?P<amount>{_NUMBER}))?"
)


def _unread(text: str, why: str) -> Misconfigured:
    return Misconfigured(
        f"faults.schedule: {text!r}: write 'AT KIND TARGET [for SECONDS] [by AMOUNT]', such as '12.5 kill decode-0': "
        f"{why}",
        param="faults.schedule",
    )


def targets_of(kind: Kind, workers: Sequence[str], *, num_gateways: int, with_store: bool) -> Sequence[str]:
    match kind:
        case Kind.GATEWAY_RESTART | Kind.INDEX_LOST:
            return [str(place) for place in range(num_gateways)]
        case Kind.LANE_STALL | Kind.LANE_CUT | Kind.LANE_SLOW:
            return [f"{source}>{other}" for source, other in product(workers, workers) if source != other]
        case Kind.STORE_AWAY | Kind.STORE_LOST:
            return [STORE] if with_store else []
        case Kind.ABORTS:
            return [CLIENTS]
        case _:
            return workers


def drawn(
    num: int,
    *,
    seed: int,
    workers: Sequence[str],
    num_gateways: int,
    until_s: float,
    with_store: bool = False,
    of: Collection[Kind] = tuple(Kind),
) -> list[Fault]:
    rng = random.Random(f"{seed} faults")
    kinds = [kind for kind in of if with_store or kind not in OF_STORES]
    targets = {kind: targets_of(kind, workers, num_gateways=num_gateways, with_store=with_store) for kind in kinds}
    faults = []
    for _ in range(num):
        kind = rng.choice(kinds)
        if not targets[kind]:  # no lane of a single worker
            kind = Kind.ABORTS
        target = CLIENTS if kind is Kind.ABORTS else STORE if kind in OF_STORES else rng.choice(targets[kind])
        at_s = round(rng.uniform(0.0, until_s), 3)
        duration_s = round(rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5), 3)
        amount = round(rng.uniform(0.1, 1.0) if kind is Kind.ABORTS else rng.uniform(2.0, 50.0), 2)
        faults.append(
            Fault(
                at_s=at_s,
                kind=kind,
                target=target,
                duration_s=duration_s if kind in LASTING else DURATION_S,
                amount=amount if kind in MEASURED else AMOUNT,
            )
        )
    return sorted(faults, key=lambda fault: (fault.at_s, str(fault)))
