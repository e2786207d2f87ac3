"""Runs a batch on a model: packs its rows into tensors, one forward pass, then sampling on rank 0.

Legend: T tokens of the batch (rows packed), S rows, B blocks of the longest row, R positions with logits, V vocabulary.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from protos.values import Logprobs
from workers.attention.base import AttentionBackend, AttentionInputs
from workers.engine.batch import Batch, Row, RowOutput, StepOutput
from workers.engine.sampler import sample, score
from workers.models.decoder import Decoder, ModelInputs


class TorchRunner:
    """One rank's runner. All ranks must run the same batches; only rank 0 samples, the others return no rows.

    CPU and CUDA share every line: tensors are packed on the host and moved once.
    """

    def __init__(self, decoder: Decoder, attention: AttentionBackend, *, block_size: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._block_size = block_size
        self._device = decoder.place.device
        self._rank = decoder.place.parallel.rank

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Raises WorkerLost when a rank has gone, and torch's own error when memory runs out."""
        inputs = pack(batch, block_size=self._block_size, device=self._device)
        logits_RV = self._decoder.forward(inputs, self._attention)
        if self._rank:
            return StepOutput(rows=())
        return read(batch, logits_RV)


def pack(batch: Batch, *, block_size: int, device: str) -> ModelInputs:
    """The batch as tensors on `device`. Logits are asked for in the order in which `read` takes them."""
    rows = batch.rows
    lens_S = np.array([len(row.token_ids) for row in rows])
    starts_S = np.array([row.start for row in rows])
    query_starts = np.concatenate(([0], np.cumsum(lens_S)))
    num_tokens = int(query_starts[-1])
    positions_T = np.arange(num_tokens) + np.repeat(starts_S - query_starts[:-1], lens_S)
    tables_SB = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), dtype=np.int32)
    for table_B, row in zip(tables_SB, rows, strict=True):
        table_B[: len(row.block_ids)] = row.block_ids
    blocks_T = tables_SB[np.repeat(np.arange(len(rows)), lens_S), positions_T // block_size].astype(np.int64)
    context_lens = (starts_S + lens_S).tolist()
    attention = AttentionInputs(
        positions_T=_move(positions_T, device),
        slots_T=_move(blocks_T * block_size + positions_T % block_size, device),
        query_starts=tuple(query_starts.tolist()),
        context_lens=tuple(context_lens),
        block_tables_SB=_move(tables_SB, device),
        max_query=int(lens_S.max()),
        max_context=max(context_lens),
    )
    logit_rows = list(chain.from_iterable(map(_wanted, rows, query_starts.tolist())))
    token_ids_T = np.fromiter(chain.from_iterable(row.token_ids for row in rows), dtype=np.int64, count=num_tokens)
    return ModelInputs(
        token_ids_T=_move(token_ids_T, device),
        attention=attention,
        logit_rows=_move(np.array(logit_rows, dtype=np.int64), device),
        prompt_lens=tuple(row.prompt_len for row in rows),
    )


def read(batch: Batch, logits_RV: torch.Tensor) -> StepOutput:
    """Samples where rows ask for it and scores the prompt tokens they name."""
    sampled, positions, scored = [], [], {}
    position = 0
    for index, row in enumerate(batch.rows):
        if row.prompt_targets:
            scored[index] = _score_prompt(row, logits_RV[position : position + len(row.prompt_targets)])
            position += len(row.prompt_targets)
        if row.sample is not None:
            sampled.append(row.sample)
            positions.append(position)
            position += 1
    chosen = iter(sample(logits_RV[positions] if scored else logits_RV, sampled) if sampled else ())
    outputs = []
    for index, row in enumerate(batch.rows):
        output = next(chosen) if row.sample is not None else RowOutput()
        if index in scored:
            output = RowOutput(token_id=output.token_id, logprobs=output.logprobs, prompt_logprobs=scored[index])
        outputs.append(output)
    return StepOutput(rows=tuple(outputs))


def _wanted(row: Row, start: int) -> list[int]:
    """Indices into T of a row that starts there: first the positions that predict its targets, then the sampled."""
    wanted = list(range(start, start + len(row.prompt_targets)))
    if row.sample is not None:
        wanted.append(start + len(row.token_ids) - 1)
    return wanted


def _score_prompt(row: Row, logits_RV: torch.Tensor) -> tuple[Logprobs, ...]:
    return tuple(score(logits_RV, row.prompt_targets, [row.num_prompt_logprobs] * len(row.prompt_targets)))


def _move(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
