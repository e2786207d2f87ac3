"""The seam between an engine and whatever keeps answers to their grammars. No torch, no library."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.batch import Sample

Mask = NDArray[np.int32]
"""Which tokens may come next: bit i % 32 of word i // 32 is that of token i. [ceil(V / 32)]"""


class Grammars(Protocol):
    """Grammars of one model's answers. Called from the engine's thread only.

    What may come next depends on a request's grammar and its output tokens alone: whoever goes on with a request, on
    this worker or on another, gets the same masks.
    """

    def prepare(self, grammar: str) -> None:
        """The grammar will be needed soon: compiling it begins, and nobody waits. Raises InvalidRequest where nothing
        can be constrained."""
        ...

    def allowed(self, request_id: str, sample: Sample) -> Mask:
        """What may come after `sample.output_ids`: never nothing, and an end-of-sequence token only where the grammar
        is fulfilled. Raises InvalidRequest for a grammar that cannot be followed (any further), or outputs that break
        it."""
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
