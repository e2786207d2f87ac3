"""The tokens of a model that can be computed by hand, for the simulator; `tests/unit/workers/toy.py` has its runner.

The KV of a position is one number, (token + 1) * 7919 + position. The next token is a function of the worker's weight
and of *all* numbers read through the block table: a wrong table, or a block that never arrived or came from elsewhere,
shows as a wrong token.
"""

from __future__ import annotations

from workers.batch import Sample
from workers.grammar.grammar_seam import Mask

STRIDE = 1_000_003
MODULUS = 65_521  # the largest prime of 16 bits: a position takes two bytes in the simulator


def summed_token(total: int, *, weight: int, vocab_size: int, sample: Sample, mask: Mask | None = None) -> int:
    """The token after positions i whose sum of (i + 1) * kv[i] is `total`: (weight + total) mod a prime, mod the
    vocabulary.

    With a temperature, seed and index count as well. Banned ids are skipped, and so are ids that the `mask` of a
    grammar does not allow.
    """
    score = weight * STRIDE + total
    if sample.params.temperature > 0:
        score += sample.params.seed * 31 + sample.index * 17
    token_id = score % MODULUS % vocab_size
    if mask is not None:
        while not (mask[token_id // 32] >> token_id % 32) & 1:
            token_id = (token_id + 1) % vocab_size
        return token_id
    while token_id in sample.banned_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id
