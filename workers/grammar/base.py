"""The seam between an engine and whatever keeps answers to their grammars. No torch, no library."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.batch import Sample

Mask = NDArray[np.int32]
"""Which tokens may come next: bit i % 32 of word i // 32 is that of token i. [ceil(V / 32)]"""


class Grammars(Protocol):
    """Grammars of one model's answers. Called from the engine's thread only, which waits for none of them: what a
    grammar may take long for is done beside it.

        begin ──▶ being made ──▶ ready ── allowed: the mask ──▶ a token is sampled ──▶ begin
                      └────── too early ── allowed: None ──▶ late, until it is ready

    What may come next depends on a request's grammar and its output tokens alone: whoever goes on with a request, on
    this worker or on another, at once or late, gets the same masks.
    """

    listener: Callable[[], None]
    """Called, from any thread, whenever something is ready."""

    def begin(self, request_id: str, grammar: str, output_ids: tuple[int, ...]) -> None:
        """The request will sample what comes after these tokens. A request that is new is `late` until that can be
        said. Raises InvalidRequest where nothing can be constrained."""
        ...

    def pending(self) -> Collection[str]:
        """Requests that had better not be planned: what they may say next will take its time. Asked once a step."""
        ...

    def allowed(self, request_id: str, sample: Sample) -> Mask | None:
        """What may come after `sample.output_ids`: never nothing, and an end-of-sequence token only where the grammar
        is fulfilled. None if it is not known yet: the request is late then. Raises InvalidRequest for a grammar that
        cannot be followed (any further), or outputs that break it."""
        ...

    def release(self, request_ids: Collection[str]) -> None:
        """They have ended here: nothing is kept of them. May name requests that are not known."""
        ...

    def __len__(self) -> int:
        """Requests that something is kept of."""
        ...


def without(mask: Mask, banned_ids: Collection[int]) -> Mask:
    """The mask without tokens that must not be chosen yet; as it is if nothing else were left: a grammar that is over
    cannot wait for `min_tokens`."""
    if not banned_ids:
        return mask
    ids = np.array(list(banned_ids))
    kept = mask.copy()
    np.bitwise_and.at(kept, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32))
    return kept if kept.any() else mask
