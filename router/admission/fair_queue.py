"""Who goes next: the highest priority, in it the tenant that was served least, of it the earliest deadline. Pure.

Tenants share by tokens served, not by requests: each has a virtual counter, and the lowest goes first (VTC: Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024). A prompt's token counts once, an answer's `OUTPUT_WEIGHT`
times, both divided by the tenant's weight. Who comes back after a pause starts level with those that wait: silence
saves nothing up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from protos.value import Value

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class Entry(Value, frozen=True, kw_only=True):
    """A job that waits. `deadline_s` (the loop's clock) is when its first token must be there, or inf;
    `num_tokens` are to be read for it. `number` tells equals apart: earlier ones have smaller ones."""

    number: int
    tenant: str
    priority: int
    num_tokens: int
    deadline_s: float


def _order(entry: Entry) -> tuple[float, int]:
    return (entry.deadline_s, entry.number)


@dataclass(slots=True)
class TenantQueue:
    """What waits of one tenant, earliest first, and how many tokens that are."""

    entries: list[Entry] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, entry: Entry) -> None:
        insort(self.entries, entry, key=_order)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> bool:
        """Whether it was there."""
        place = self._place(entry)
        if place == len(self.entries) or self.entries[place] != entry:
            return False
        del self.entries[place]
        self.num_tokens -= entry.num_tokens
        return True

    def before(self, entry: Entry) -> int:
        """Tokens of those that go before it. Who comes goes last, mostly: what is behind is less to look at."""
        return self.num_tokens - sum(other.num_tokens for other in self.entries[self._place(entry) :])

    def check_integrity(self) -> None:
        assert self.entries, "a row of nobody is kept"
        assert all(_order(a) < _order(b) for a, b in pairwise(self.entries)), "a row is out of order"
        num_tokens = sum(entry.num_tokens for entry in self.entries)
        assert self.num_tokens == num_tokens, f"a row counts {self.num_tokens} tokens, {num_tokens} wait in it"

    def _place(self, entry: Entry) -> int:
        return bisect_left(self.entries, _order(entry), key=_order)


class FairQueue:
    """`weights` of tenants; one that is not named has weight 1. What is done for every request is about linear in the
    tenants that wait; `tokens_ahead` also in those of the same tenant that are due later, which are mostly few."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._waiting: dict[int, dict[str, TenantQueue]] = {}  # priority -> tenant
        self._served: dict[str, float] = {}
        self._last_served = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        return (entry for tenants in self._waiting.values() for row in tenants.values() for entry in row.entries)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """The tenants' weights from now on; those no longer named, who do not wait either, are forgotten."""
        self._weights = dict(weights)
        waiting = {entry.tenant for entry in self}
        self._served = {name: count for name, count in self._served.items() if name in waiting or name in weights}

    def push(self, entry: Entry) -> None:
        self._lift(entry.tenant)
        self._waiting.setdefault(entry.priority, {}).setdefault(entry.tenant, TenantQueue()).add(entry)
        self._size += 1

    def peek(self) -> Entry | None:
        """Who goes next."""
        if not self._waiting:
            return None
        tenants = self._waiting[max(self._waiting)]
        least = min(tenants, key=lambda tenant: (self.served(tenant), _order(tenants[tenant].entries[0])))
        return tenants[least].entries[0]

    def last(self) -> Entry | None:
        """Who would go last: the first to be refused when the queue is full."""
        if not self._waiting:
            return None
        tenants = self._waiting[min(self._waiting)]
        most = max(tenants, key=lambda tenant: (self._backlog(tenants, tenant), _order(tenants[tenant].entries[-1])))
        return tenants[most].entries[-1]

    def remove(self, entry: Entry) -> None:
        """The entry leaves, whether its turn has come or not. Unknown: nothing happens."""
        tenants = self._waiting.get(entry.priority, {})
        row = tenants.get(entry.tenant)
        if row is None or not row.remove(entry):
            return
        self._size -= 1
        if not row.entries:
            del tenants[entry.tenant]
            self._last_served = self.served(entry.tenant)
        if not tenants:
            del self._waiting[entry.priority]

    def charge(self, tenant: str, *, num_input: int = 0, num_output: int = 0) -> None:
        """The tenant has been served so many tokens."""
        cost = INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output
        self._served[tenant] = self.served(tenant) + cost / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """The tenant's virtual counter."""
        return self._served.get(tenant, 0.0)

    def tokens_ahead(self, entry: Entry) -> int:
        """About how many prompt tokens are read before those of `entry`, which need not wait yet: all of higher
        priority; of its own tenant those that are due earlier; of each other tenant at most its fair share of that."""
        higher = sum(
            row.num_tokens
            for priority, tenants in self._waiting.items()
            if priority > entry.priority
            for row in tenants.values()
        )
        level = self._waiting.get(entry.priority, {})
        own = level[entry.tenant].before(entry) if entry.tenant in level else 0
        share = (own + entry.num_tokens) / self._weights.get(entry.tenant, 1.0)
        for tenant, row in level.items():
            if tenant != entry.tenant:
                own += min(row.num_tokens, int(share * self._weights.get(tenant, 1.0)))
        return higher + own

    def late(self, now: float) -> list[Entry]:
        """Entries whose deadline has passed: the first ones of each tenant's."""
        rows = (row for tenants in self._waiting.values() for row in tenants.values())
        return [entry for row in rows for entry in takewhile(lambda one: one.deadline_s <= now, row.entries)]

    def next_deadline_s(self) -> float:
        """inf when none waits, or none has a deadline."""
        heads = (row.entries[0] for tenants in self._waiting.values() for row in tenants.values())
        return min((entry.deadline_s for entry in heads), default=float("inf"))

    def check_integrity(self) -> None:
        """What is counted is what waits."""
        assert all(self._waiting.values()), "a priority that nobody has is kept"
        rows = [row for tenants in self._waiting.values() for row in tenants.values()]
        for row in rows:
            row.check_integrity()
        num_entries = sum(len(row.entries) for row in rows)
        assert self._size == num_entries, f"{self._size} are said to wait, {num_entries} do"

    def _backlog(self, tenants: Mapping[str, TenantQueue], tenant: str) -> float:
        return self.served(tenant) + tenants[tenant].num_tokens / self._weights.get(tenant, 1.0)

    def _lift(self, tenant: str) -> None:
        if any(tenant in tenants for tenants in self._waiting.values()):
            return
        waiting = (other for tenants in self._waiting.values() for other in tenants)
        level = min((self.served(other) for other in waiting), default=self._last_served)
        self._served[tenant] = max(self.served(tenant), level)
