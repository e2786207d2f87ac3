"""The order of waiting jobs: the highest priority, then the tenant that was served least, then the earliest deadline.
Pure.

Tenants share by tokens served, not by requests: each has a virtual counter, and the lowest goes first (VTC: Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024). A prompt's token counts once, an answer's `OUTPUT_WEIGHT`
times, both divided by the tenant's weight. A tenant that returns after a pause starts level with the waiting tenants: a
pause earns no credit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from protos.codec import Value

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class Entry(Value, frozen=True, kw_only=True):
    """A waiting job. `deadline_s` (the loop's clock) is when its first token is due, or inf. `num_tokens` are to be
    prefilled for it. `number` orders equal entries: the earlier one has the smaller number."""

    number: int
    tenant: str
    priority: int
    num_tokens: int
    deadline_s: float


def _order(entry: Entry) -> tuple[float, int]:
    return (entry.deadline_s, entry.number)


@dataclass(slots=True)
class TenantQueue:
    entries: list[Entry] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, entry: Entry) -> None:
        insort(self.entries, entry, key=_order)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> bool:
        place = self._place(entry)
        if place == len(self.entries) or self.entries[place] != entry:
            return False
        del self.entries[place]
        self.num_tokens -= entry.num_tokens
        return True

    def before(self, entry: Entry) -> int:
        """Counts tokens of the entries before this one. A new entry is usually near the end, so the sum runs over the
        later entries."""
        return self.num_tokens - sum(other.num_tokens for other in self.entries[self._place(entry) :])

    def check_integrity(self) -> None:
        assert self.entries, "an empty row is kept"
        assert all(_order(a) < _order(b) for a, b in pairwise(self.entries)), "a row is out of order"
        num_tokens = sum(entry.num_tokens for entry in self.entries)
        assert self.num_tokens == num_tokens, f"a row counts {self.num_tokens} tokens, {num_tokens} wait in it"

    def _place(self, entry: Entry) -> int:
        return bisect_left(self.entries, _order(entry), key=_order)


class FairQueue:
    """A queue of jobs, fair by tenant. A tenant without an entry in `weights` has weight 1. A call takes about linear
    time in the number of waiting tenants; `tokens_ahead` also in the tenant's own later entries, usually few."""

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

    @property
    def mean_tokens(self) -> float:
        num_tokens = sum(row.num_tokens for tenants in self._waiting.values() for row in tenants.values())
        return num_tokens / max(1, self._size)

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        waiting = {entry.tenant for entry in self}
        self._served = {name: count for name, count in self._served.items() if name in waiting or name in weights}

    def push(self, entry: Entry) -> None:
        self._lift(entry.tenant)
        self._waiting.setdefault(entry.priority, {}).setdefault(entry.tenant, TenantQueue()).add(entry)
        self._size += 1

    def peek(self) -> Entry | None:
        if not self._waiting:
            return None
        tenants = self._waiting[max(self._waiting)]
        least = min(tenants, key=lambda tenant: (self.served(tenant), _order(tenants[tenant].entries[0])))
        return tenants[least].entries[0]

    def last(self) -> Entry | None:
        if not self._waiting:
            return None
        tenants = self._waiting[min(self._waiting)]
        most = max(tenants, key=lambda tenant: (self._backlog(tenants, tenant), _order(tenants[tenant].entries[-1])))
        return tenants[most].entries[-1]

    def remove(self, entry: Entry) -> None:
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
        cost = INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output
        self._served[tenant] = self.served(tenant) + cost / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def tokens_ahead(self, entry: Entry) -> int:
        """Estimates how many prompt tokens begin before `entry`: all of higher priority; of its own tenant earlier
        deadlines; of each other tenant its fair share at most, and one request."""
        higher = sum(
            row.num_tokens
            for priority, tenants in self._waiting.items()
            if priority > entry.priority
            for row in tenants.values()
        )
        level = self._waiting.get(entry.priority, {})
        own = level[entry.tenant].before(entry) if entry.tenant in level else 0
        share = own / self._weights.get(entry.tenant, 1.0)
        for tenant, row in level.items():
            if tenant != entry.tenant:
                others = int(share * self._weights.get(tenant, 1.0)) + row.entries[0].num_tokens
                own += min(row.num_tokens, others)
        return higher + own

    def late(self, now: float) -> list[Entry]:
        rows = (row for tenants in self._waiting.values() for row in tenants.values())
        return [entry for row in rows for entry in takewhile(lambda entry: entry.deadline_s <= now, row.entries)]

    def next_deadline_s(self) -> float:
        heads = (row.entries[0] for tenants in self._waiting.values() for row in tenants.values())
        return min((entry.deadline_s for entry in heads), default=float("inf"))

    def check_integrity(self) -> None:
        assert all(self._waiting.values()), "an empty priority is kept"
        rows = [row for tenants in self._waiting.values() for row in tenants.values()]
        for row in rows:
            row.check_integrity()
        num_entries = sum(len(row.entries) for row in rows)
        assert self._size == num_entries, f"{self._size} are counted, {num_entries} wait"

    def _backlog(self, tenants: Mapping[str, TenantQueue], tenant: str) -> float:
        return self.served(tenant) + tenants[tenant].num_tokens / self._weights.get(tenant, 1.0)

    def _lift(self, tenant: str) -> None:
        if any(tenant in tenants for tenants in self._waiting.values()):
            return
        waiting = (other for tenants in self._waiting.values() for other in tenants)
        level = min((self.served(other) for other in waiting), default=self._last_served)
        self._served[tenant] = max(self.served(tenant), level)
