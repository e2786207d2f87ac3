"""The seam between an engine and the library that keeps answers to their grammars. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.batch import Sample

Mask = NDArray[np.int32]
"""Which tokens may come next: bit i % 32 of word i // 32 is that of token i. [ceil(V / 32)]"""


class Grammars(Protocol):
    """Grammars of one model's answers. Called from the engine's thread only, and never blocks it: masks are computed on
    other threads.

        begin ──▶ being made ──▶ ready ── allowed: the mask ──▶ a token is sampled ──▶ begin
                      └────── too early ── allowed: None ──▶ pending, until ready

    A mask depends on a request's grammar and its output tokens alone: a request that continues on another worker gets
    the same masks.
    """

    listener: Callable[[], None]
    """Called, from any thread, whenever a mask is ready."""

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None:
        """Begins to compute the mask of the token after `output_ids`; a new request is pending until it is ready.
        Raises InvalidRequest if the model's answers cannot be constrained."""
        ...

    def pending(self) -> Collection[str]:
        """Requests that should not be planned, as their masks take long. Called once a step."""
        ...

    def allowed(self, request_id: str, sample: Sample) -> Mask | None:
        """The mask of the token after `sample.output_ids`. It allows at least one token, and end-of-sequence only where
        the grammar is fulfilled. None while it is pending. Raises InvalidRequest for a grammar that cannot be followed
        (any further), or outputs that break it."""
        ...

    def draft(self, request_id: str, draft_ids: tuple[int, ...]) -> None:
        """Begins to compute the masks after each of these drafts, which follow the output of the last `begin`. The
        request must not be pending."""
        ...

    def allowed_after(self, request_id: str, samples: Sequence[Sample]) -> Sequence[Mask]:
        """The masks after drafts: `samples[i]` is the state after i of them (i = 0 was passed to `allowed`). Returns
        those from 1 on, up to the first draft that the grammar forbids; None while they are pending."""
        ...

    def release(self, request_ids: Collection[str]) -> None: ...

    def __len__(self) -> int:
        """Number of requests that have not been released."""
        ...


def without(mask: Mask, banned_ids: Collection[int]) -> Mask:
    """The mask without banned tokens; unchanged if no token were left: a fulfilled grammar cannot wait for
    `min_tokens`."""
    if not banned_ids:
        return mask
    ids = np.array(list(banned_ids))
    copy = mask.copy()
    np.bitwise_and.at(copy, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32))
    return copy if copy.any() else mask
