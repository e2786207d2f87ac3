"""The nouns of routing decisions. Everything here is a value or a pure function over values.

    Candidate ...──▶ Rank (basic, prefix_aware) ──▶ Score ... ──▶ pair ──▶ Decision
                     limits wrap a Rank or a Policy         all at once, as columns: `candidates`

A score is a cost: the lowest total wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from protos.value import Value
from protos.values import WorkerRole

if TYPE_CHECKING:
    from router.policies.table import Ways


class Line(Value, frozen=True, kw_only=True):
    """Seconds for an amount of work: `fixed_s`, and `each_s` for each unit of it."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def __call__(self, amount: float) -> float:
        return self.fixed_s + self.each_s * amount


UNKNOWN = Line()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What a policy may know of a request. `num_tokens` must be in the KV cache before the next token can be made:
    the prompt, and what was answered before the request had to move. `num_decided` decisions came before this one.

    Requests of one `session` are turns of one conversation: the client's word for it, or the first block that few share
    (`router.dispatch.sessions`). An answer is expected to have `answer_tokens`, and its first one is wanted within
    `within_s`.
    The KV of a block has `block_bytes`; `lanes` are the seconds that KV of so many bytes is awaited from a reader by a
    writer, for pairs that have been measured.
    """

    request_id: str
    num_tokens: int
    block_size: int
    num_decided: int = 0
    session: str = ""
    answer_tokens: float = 64.0
    within_s: float = math.inf
    block_bytes: int = 0
    lanes: Mapping[str, Ways] = field(default_factory=dict)


class Candidate(Value, frozen=True, kw_only=True):
    """A worker that takes new work. Load is what it said last plus what was routed there and it has not seen yet.

    `num_cached_tokens` of this request are in its cache, always fewer than the request has; `num_host_tokens` of them
    only in its host's memory, and must be loaded. `num_waiting` of its `num_requests` have not begun. Speed and step
    are as the worker measured them last, 0 before the first measurement.

    What is expected of it (`router.latency.predictor`): `reading` are the seconds to a first token, by the tokens to be
    read before it; `loading` those until tokens that its host has are on its device; `stepping` those between tokens,
    by the sequences it writes at a time; `receiving` those that KV is awaited, by its bytes, from a reader that no lane
    of the view comes from. `recent_tokens` were sent there to be computed lately, or could have been while answers
    slowed down those beside them: the older, the less they count.
    """

    worker_id: str
    role: WorkerRole
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    reading: Line = UNKNOWN
    loading: Line = UNKNOWN
    stepping: Line = UNKNOWN
    receiving: Line = UNKNOWN
    recent_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one candidate would cost, and the terms that make up the total."""

    worker_id: str
    role: WorkerRole
    total: float
    terms: tuple[tuple[str, float], ...] = ()


class Alone(StrEnum):
    """Why one worker does the whole request."""

    COLOCATED = "colocated"
    NO_PREFILL_WORKER = "no prefill worker"
    STANDS_IN = "stands in for the decode pool"
    SHORT_REMAINDER = "short remainder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`prefill` is None when `decode` reads the prompt itself, and `alone` says why. `scores` are those of the readers
    and of the writers; of large pools the lowest and the chosen one's."""

    policy: str
    prefill: str | None
    decode: str
    alone: Alone | None = None
    scores: Sequence[Score] = ()


Policy = Callable[[RequestView, Sequence[Candidate]], Decision]
"""Chooses from all pools. There is at least one candidate."""


def cost_unit(policy: str) -> tuple[str, float]:
    """In which unit people read a policy's costs, and how many of it are one of the policy's. What `slo` weighs are
    seconds, what others weigh has no unit."""
    return ("ms", 1000.0) if policy == "slo" else ("", 1.0)


def cost_figure(cost: float) -> str:
    """A cost as people read it, on the page (router/dashboard/script.js) as well: three digits, and all before the
    point; 0 for what is nearer to it than to a thousandth."""
    if abs(cost) < 0.0005:
        return "0"
    return f"{cost:,.0f}" if abs(cost) >= 999.5 else f"{cost:.3g}"
