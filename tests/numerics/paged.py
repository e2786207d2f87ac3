"""Runs a decoder by hand over a paged cache: what the runner does, without scheduler or sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvtransfer.reshard import cut_in, cut_out, incoming, outgoing, pieces
from kvtransfer.transport import Chunk
from protos.values import LaneAddress, Ticket
from workers.adapters.low_rank import AdapterTokens
from workers.attention.backend import AttentionInputs, GroupTables
from workers.attention.registry import attention_for
from workers.kv.kinds import with_kv_dtype
from workers.kv.kv_storage import KVStorage
from workers.models.decoder import ModelInputs
from workers.models.interface import ServedDecoder
from workers.runner.fused_layers import fused_layers
from workers.worker_config import KVDtype

Row = tuple[str, Sequence[int], int]
"""A sequence's name, its next tokens, and the length of its whole prompt."""


class PagedRun:
    """Sequences by name, each with blocks scattered over the cache in a random order. `told` are the layers that a
    model whose layers are `fused` tells of."""

    def __init__(
        self,
        model: ServedDecoder,
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

    def step(self, rows: Sequence[Row], adapters: Sequence[str] = ()) -> list[torch.Tensor]:
        """Logits of every token, [tokens, vocab] for each row; `adapters`: an id or "" for each row."""
        counts = [len(token_ids) for _, token_ids, _ in rows]
        return list(torch.split(self.logits(rows, range(sum(counts)), adapters), counts))

    def logits(self, rows: Sequence[Row], logit_rows: Sequence[int], adapters: Sequence[str] = ()) -> torch.Tensor:
        """[len(logit_rows), vocab]: `logit_rows` count over the tokens of all rows."""
        starts = [self._lens.get(name, 0) for name, _, _ in rows]
        for (name, token_ids, _), start in zip(rows, starts, strict=True):
            self._lens[name] = start + len(token_ids)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.storage.layout.block_size < self._lens[name]:
                blocks.append(self._free.pop())
        inputs = replace(self._inputs(rows, starts, logit_rows), adapters=_tokens_of(adapters, rows))
        self._attention.begin(inputs.attention)
        return self.model.forward(inputs, self._attention, self.through)

    def adopt(self, name: str, sources: Sequence[PagedRun], rank: int) -> None:
        """Moves a sequence from all ranks of another worker to this rank."""
        layout, source = self.storage.layout, sources[0].storage.layout
        self._lens[name] = sources[0]._lens[name]
        blocks = self._blocks[name] = [self._free.pop() for _ in sources[0]._blocks[name]]
        ticket = Ticket(
            ticket_id=name, generation=1, lease_s=1.0, block_ids=tuple(blocks), num_cached_tokens=0, layout=layout,
            destination=LaneAddress(worker_id="here", incarnation=1, host="127.0.0.1", port=0),
        )  # fmt: skip
        chunk = Chunk(ticket_id=name, generation=1, first_block=0, num_blocks=len(blocks))
        parts: dict[range, torch.Tensor] = {}
        for owner in {part.source for part in incoming(source, layout, rank)}:
            cut = cut_out(source, owner, ticket, chunk, sources[owner]._blocks[name])
            payload = sources[owner].storage.read(cut, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
            sizes = [len(payload) // cut.num_heads * len(piece) for piece in cut.pieces]
            ranges = pieces(outgoing(source, layout, owner))
            parts |= dict(zip(ranges, torch.split(payload, sizes), strict=True))
        wanted = pieces(incoming(source, layout, rank))
        cut = cut_in(layout, rank, source, chunk, blocks)
        self.storage.write(cut, torch.cat([parts[heads] for heads in wanted]))

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


def _tokens_of(adapters: Sequence[str], rows: Sequence[Row]) -> tuple[AdapterTokens, ...]:
    places: dict[str, list[int]] = {}
    position = 0
    for (_, token_ids, _), adapter in zip(rows, adapters, strict=False):
        if adapter:
            places.setdefault(adapter, []).extend(range(position, position + len(token_ids)))
        position += len(token_ids)
    return tuple(AdapterTokens(adapter_id=name, places_T=torch.tensor(rows)) for name, rows in places.items())


def in_chunks(run: PagedRun, token_ids: Sequence[int], sizes: Sequence[int], *, prompt_len: int) -> torch.Tensor:
    """One sequence alone, cut at `sizes` and token by token after them: [tokens, vocab]."""
    cuts, logits = list(sizes) + [1] * (len(token_ids) - sum(sizes)), []
    start = 0
    for size in cuts:
        logits += run.step([("only", token_ids[start : start + size], prompt_len)])
        start += size
    return torch.cat(logits)
