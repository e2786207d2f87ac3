"""How likely the positions of a draft are accepted, learned from the drafts before it. Pure.

    position     1         2         3         4
    chance       first  *  further * further * further      each only if the position before it was accepted

Two rates, since a match of one token is seldom the right place, and if it is, so are the tokens behind it. A source's
drafts are sorted by their evidence (`Draft.evidence`), and all sequences share what was seen of each sort: it is the
prior of a new sequence. A sequence's own drafts of that sort count more and more as they are verified.

Old observations fade: of a sequence while none of its drafts is verified, and of a sort while its drafts are proposed
and not chosen. So both return to their priors in the end, some draft is tried, and a change of the texts is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.speculation.proposer import Draft

PRIOR_RATE = 0.6
PRIOR_WEIGHT = 4.0
"""Observations that the prior counts for."""
KEEP_OWN = 0.95
KEEP_SHARED = 0.98
"""Weight of an observation after the next draft of the same sequence or sort."""
KEEP_IDLE = 0.98
"""Weight of a sequence's observations after a step in which none of its drafts was verified."""
KEEP_PASSED = 0.998
"""Weight of a sort's observations after a step in which one of its drafts was proposed and not chosen."""
LEAST_RATE, MOST_RATE = 0.02, 0.99

Sort = tuple[str, int]


@dataclass(slots=True)
class AcceptanceRate:
    """Weighted observations."""

    accepted: float = 0.0
    observed: float = 0.0

    def observe(self, num_accepted: int, num_observed: int, keep: float) -> None:
        self.accepted = self.accepted * keep + num_accepted
        self.observed = self.observed * keep + num_observed

    def fade(self, keep: float) -> None:
        self.accepted *= keep
        self.observed *= keep

    def after(self, prior: float) -> float:
        return (self.accepted + prior * PRIOR_WEIGHT) / (self.observed + PRIOR_WEIGHT)


@dataclass(slots=True)
class PositionRates:
    """Rates of the first position of a draft, and of each one after an accepted one."""

    first: AcceptanceRate = field(default_factory=AcceptanceRate)
    further: AcceptanceRate = field(default_factory=AcceptanceRate)

    def observe(self, num_accepted: int, num_drafted: int, keep: float) -> None:
        self.first.observe(min(num_accepted, 1), 1, keep)
        if num_accepted and num_drafted > 1:
            self.further.observe(num_accepted - 1, min(num_accepted, num_drafted - 1), keep)

    def fade(self, keep: float) -> None:
        self.first.fade(keep)
        self.further.fade(keep)

    def after(self, prior: tuple[float, float]) -> tuple[float, float]:
        return self.first.after(prior[0]), self.further.after(prior[1])


@dataclass(slots=True)
class Acceptance:
    """Rates of one engine's sequences."""

    _shared: dict[Sort, PositionRates] = field(default_factory=dict)
    _own: dict[str, dict[Sort, PositionRates]] = field(default_factory=dict)

    def rates(self, request_id: str, draft: Draft) -> tuple[float, float]:
        """The probabilities that a draft's first position is accepted, and each further position if the earlier ones
        are."""
        sort = sort_of(draft)
        shared = self._shared.get(sort)
        rates_now = shared.after((PRIOR_RATE, PRIOR_RATE)) if shared is not None else (PRIOR_RATE, PRIOR_RATE)
        own = self._own.get(request_id)
        if own is not None and sort in own:
            rates_now = own[sort].after(rates_now)
        first, further = rates_now
        return min(max(first, LEAST_RATE), MOST_RATE), min(max(further, LEAST_RATE), MOST_RATE)

    def chances(self, request_id: str, draft: Draft, num_positions: int) -> list[float]:
        """For each position, the probability that it is reached and accepted."""
        first, further = self.rates(request_id, draft)
        return [first * further**place for place in range(num_positions)]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        sort, num_drafted = sort_of(draft), len(draft.token_ids)
        own = self._own.setdefault(request_id, {})
        for rates, keep in ((self._shared, KEEP_SHARED), (own, KEEP_OWN)):
            if sort not in rates:
                rates[sort] = PositionRates()
            rates[sort].observe(num_accepted, num_drafted, keep)

    def idle(self, request_id: str) -> None:
        """A step in which no draft of the sequence was verified."""
        for own in self._own.get(request_id, {}).values():
            own.fade(KEEP_IDLE)

    def passed(self, draft: Draft) -> None:
        shared = self._shared.get(sort_of(draft))
        if shared is not None:
            shared.fade(KEEP_PASSED)

    def forget(self, source: str) -> None:
        """Forgets a source's record: its drafts count as those of a new source."""
        for rates in (self._shared, *self._own.values()):
            for sort in [key for key in rates if key[0] == source]:
                del rates[sort]

    def end(self, request_id: str) -> None:
        self._own.pop(request_id, None)


def sort_of(draft: Draft) -> Sort:
    """Groups drafts by source and by the number of binary digits of their evidence."""
    return draft.source, draft.evidence.bit_length()
