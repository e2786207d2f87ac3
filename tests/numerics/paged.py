"""Runs a decoder by hand over a paged cache: what the runner does, without scheduler or sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from workers.attention.base import AttentionInputs, GroupTables
from workers.attention.registry import attention_for
from workers.config import KVDtype
from workers.kv.kinds import with_kv_dtype
from workers.kv.storage import KVStorage
from workers.models.decoder import Decoder, ModelInputs
from workers.runner.fused_layers import fused_layers

Row = tuple[str, Sequence[int], int]
"""A sequence's name, its next tokens, and the length of its whole prompt."""


class PagedRun:
    """Sequences by name, each with blocks scattered over the cache in a random order. `told` are the layers that a
    model whose layers are `fused` tells of."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        attention: str = "cpu",
        fused: bool = False,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        self.model = model
        self.told: list[int] = []
        tp = model.context.parallel.size
        layout = model.config.kv_layout(
            block_size=block_size, dtype=str(model.context.dtype).removeprefix("torch."), tp=tp
        )
        layout = with_kv_dtype(layout, kv_dtype)
        self.storage = KVStorage(layout, num_blocks=num_blocks)
        self._attention = attention_for(self.storage, attention)
        self.through = fused_layers(model, self._attention, self.told.append) if fused else None
        self._free = random.Random(7).sample(range(num_blocks), num_blocks)
        self._blocks: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Logits of every token, [tokens, vocab] for each row."""
        counts = [len(token_ids) for _, token_ids, _ in rows]
        return list(torch.split(self.logits(rows, range(sum(counts))), counts))

    def logits(self, rows: Sequence[Row], logit_rows: Sequence[int]) -> torch.Tensor:
        """[len(logit_rows), vocab]: `logit_rows` count over the tokens of all rows."""
        starts = [self._lens.get(name, 0) for name, _, _ in rows]
        for (name, token_ids, _), start in zip(rows, starts, strict=True):
            self._lens[name] = start + len(token_ids)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.storage.layout.block_size < self._lens[name]:
                blocks.append(self._free.pop())
        return self.model.forward(self._inputs(rows, starts, logit_rows), self._attention, self.through)

    def _inputs(self, rows: Sequence[Row], starts: Sequence[int], logit_rows: Sequence[int]) -> ModelInputs:
        size = self.storage.layout.block_size
        query_starts: list[int] = [0]
        positions: list[int] = []
        slots: list[int] = []
        for (name, token_ids, _), start in zip(rows, starts, strict=True):
            here = range(start, start + len(token_ids))
            positions += here
            slots += [self._blocks[name][position // size] * size + position % size for position in here]
            query_starts.append(query_starts[-1] + len(token_ids))
        tables = [torch.tensor(self._blocks[name], dtype=torch.int32) for name, _, _ in rows]
        context_lens = tuple(self._lens[name] for name, _, _ in rows)
        return ModelInputs(
            token_ids_T=torch.tensor([token for _, token_ids, _ in rows for token in token_ids]),
            attention=AttentionInputs(
                positions_T=torch.tensor(positions),
                query_starts=tuple(query_starts),
                context_lens=context_lens,
                tables=(
                    GroupTables(
                        slots_T=torch.tensor(slots),
                        block_tables_SB=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
                    ),
                ),
                max_query=max(len(token_ids) for _, token_ids, _ in rows),
                max_context=max(context_lens),
            ),
            logit_rows=torch.tensor(list(logit_rows), dtype=torch.int64),
            prompt_lens=tuple(prompt_len for _, _, prompt_len in rows),
        )


def in_chunks(run: PagedRun, token_ids: Sequence[int], sizes: Sequence[int], *, prompt_len: int) -> torch.Tensor:
    """One sequence alone, cut at `sizes` and token by token after them: [tokens, vocab]."""
    cuts, logits = list(sizes) + [1] * (len(token_ids) - sum(sizes)), []
    start = 0
    for size in cuts:
        logits += run.step([("only", token_ids[start : start + size], prompt_len)])
        start += size
    return torch.cat(logits)
