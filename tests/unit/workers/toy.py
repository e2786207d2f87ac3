"""A model that can be computed by hand: a runner without tensors.

The KV of a position is one number, a function of its token and its position. The next token is a function of the
runner's weight and of *all* numbers read through the block table: a wrong table, or a block that never arrived or came
from elsewhere, shows as a wrong token. With different weights in each pool, a token shows which pool made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.reshard import Cut
from protos.errors import InvalidRequest
from protos.values import Logprobs, SamplingParams, TokenLogprob
from protos.wire import error_info
from workers.batch import Batch, Row, RowLimits, RowOutput, Sample, StepOutput
from workers.grammar.grammar_seam import Grammars, Mask
from workers.sampling.draft_verification import drafted_samples
from workers.toy import summed_token

Payload = npt.NDArray[np.int64]
"""KV of some blocks: int64 [num_blocks, block_size]."""

EMPTY = -1


def toy_token(kv: Sequence[int], *, weight: int, vocab_size: int, sample: Sample, mask: Mask | None = None) -> int:
    """The token after positions whose KV is `kv`, as `summed_token` has it."""
    total = sum((i + 1) * value for i, value in enumerate(kv))
    return summed_token(total, weight=weight, vocab_size=vocab_size, sample=sample, mask=mask)


def toy_kv(token_id: int, position: int) -> int:
    return (token_id + 1) * 7919 + position


def toy_tokens(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    weight: int,
    vocab_size: int,
    first_weight: int | None = None,
    params: SamplingParams | None = None,
) -> tuple[int, ...]:
    """The answer without an engine. `first_weight`: of the pool that makes the first token, if another one does.
    `params` count by seed and temperature only; without them choice is greedy."""
    params = params or SamplingParams(temperature=0.0)
    kv = [toy_kv(token_id, position) for position, token_id in enumerate(prompt_ids)]
    answer: list[int] = []
    for index in range(num_tokens):
        used = first_weight if first_weight is not None and index == 0 else weight
        sample = Sample(params=params, index=index)
        answer.append(toy_token(kv, weight=used, vocab_size=vocab_size, sample=sample))
        kv.append(toy_kv(answer[-1], len(kv)))
    return tuple(answer)


class ToyRunner:
    """`num_computed` counts computed positions, `num_steps` batches. `grammars` are for rows that have one."""

    def __init__(self, weight: int, block_size: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._weight = weight
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._blocks: dict[int, Payload] = {}
        self._watchers: list[Callable[[int], None]] = []
        self.num_computed = 0
        self.num_steps = 0

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Calls it whenever a step has written its only layer, 0."""
        self._watchers.append(watcher)

    @property
    def row_limits(self) -> RowLimits:
        """It verifies drafts of rows without penalties."""
        return RowLimits(num_drafts=self._block_size)

    def run(self, batch: Batch) -> StepOutput:
        """All rows write before any reads, as in a layer of a real model."""
        for row in batch.rows:
            self._write(row)
        for watcher in self._watchers:
            watcher(0)
        self.num_computed += batch.num_tokens
        self.num_steps += 1
        return StepOutput(rows=tuple(self._output(row) for row in batch.rows))

    def gather(self, block_ids: Sequence[int]) -> Payload:
        """A copy of some blocks; EMPTY for unwritten places."""
        return np.stack([self._block(block_id) for block_id in block_ids])

    def scatter(self, block_ids: Sequence[int], payload: Payload) -> None:
        """Overwrites blocks with what `gather` gave, there or elsewhere."""
        for block_id, content in zip(block_ids, payload, strict=True):
            self._block(block_id)[:] = content

    def read(self, cut: Cut, stage: Callable[[int], object]) -> Payload:
        """A copy of the cut's units, [units, positions of a unit]."""
        positions = self.gather(cut.block_ids).reshape(-1, cut.unit)
        return positions[np.minimum(cut.units, len(positions) - 1)]

    def write(self, cut: Cut, payload: Payload) -> None:
        """Overwrites the cut's blocks with what `read` gave."""
        self.scatter(cut.block_ids, payload.reshape(len(cut.block_ids), self._block_size))

    def _block(self, block_id: int) -> Payload:
        if block_id not in self._blocks:
            self._blocks[block_id] = np.full(self._block_size, EMPTY, dtype=np.int64)
        return self._blocks[block_id]

    def _write(self, row: Row) -> None:
        for position, token_id in enumerate((*row.token_ids, *row.draft_ids), row.start):
            block_id = row.block_ids[position // self._block_size]
            self._block(block_id)[position % self._block_size] = toy_kv(token_id, position)

    def _output(self, row: Row) -> RowOutput:
        prompt_logprobs = tuple(self._logprobs(target, row.num_prompt_logprobs) for target in row.prompt_targets)
        if row.sample is None:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        try:
            mask = self._mask(row.request_id, row.sample)
        except InvalidRequest as error:
            return RowOutput(error=error_info(error))
        if mask is None and row.sample.params.grammar:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        token_ids = self._sampled(row, row.sample, self._masks(row, row.sample, mask))
        num_top = row.sample.params.logprobs
        return RowOutput(
            token_ids=token_ids,
            logprobs=() if num_top is None else tuple(self._logprobs(token_id, num_top) for token_id in token_ids),
            prompt_logprobs=prompt_logprobs,
        )

    def _masks(self, row: Row, sample: Sample, mask: Mask | None) -> Sequence[Mask | None]:
        if mask is None or self._grammars is None or not row.draft_ids:
            return [mask] * (1 + len(row.draft_ids))
        return [mask, *self._grammars.allowed_after(row.request_id, drafted_samples(sample, row.draft_ids))]

    def _sampled(self, row: Row, sample: Sample, masks: Sequence[Mask | None]) -> tuple[int, ...]:
        """The token after the row's positions, and after each draft that equals the token before it."""
        kv = self.gather(row.block_ids).reshape(-1)[: row.stop].tolist()
        num_known, token_ids = row.stop - len(row.draft_ids), list[int]()
        samples = drafted_samples(sample, row.draft_ids) if row.draft_ids else [sample]
        for index, (draft_id, mask) in enumerate(zip((*row.draft_ids, None), masks, strict=False)):
            at = samples[index]
            seen = kv[: num_known + index]
            token_ids.append(toy_token(seen, weight=self._weight, vocab_size=self._vocab_size, sample=at, mask=mask))
            if token_ids[-1] != draft_id:
                break
        return tuple(token_ids)

    def _mask(self, request_id: str, sample: Sample) -> Mask | None:
        if not sample.params.grammar:
            return None
        assert self._grammars is not None, "a grammar passed an engine that has none"
        return self._grammars.allowed(request_id, sample)

    def _logprobs(self, token_id: int, num_top: int) -> Logprobs:
        """A distribution with `token_id` as the best, then the ids after it, each half as likely."""
        best = TokenLogprob(token_id=token_id, logprob=float(np.log(0.5)))
        top = (
            TokenLogprob(token_id=(token_id + k) % self._vocab_size, logprob=float(np.log(0.5) * (k + 1)))
            for k in range(num_top)
        )
        return Logprobs(chosen=best, top=tuple(top), rank=1)
