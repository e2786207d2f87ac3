"""Heads of the target on one rank: they read its hidden states, and keep KV of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from protos.values import KVHead
from workers.attention.backend import AttentionBackend
from workers.attention.registry import attention_for
from workers.batch import Batch, RowOutput, Sample, StepOutput
from workers.kernels.this_device import to_device
from workers.parallel.ranks import Leader
from workers.runner.inputs import model_inputs
from workers.runner.packed_batch import pack
from workers.sampling.sampler import sample
from workers.speculation.heads.draft_head import DraftHead
from workers.speculation.heads.medusa import MedusaHeads
from workers.speculation.proposer import Proposer
from workers.speculation.proposers.head_proposer import HeadProposer
from workers.speculation.proposers.medusa_proposer import MedusaProposer
from workers.speculation.ranks.draft_cache import DraftCache, Drafting
from workers.worker_config import WorkerConfig

_NONE = -1


class HeadDrafting(Drafting):
    """`name`: the proposer's; `identity`: of the head's files. A row of its batches holds entries: its token follows
    the entry's position, and its sample chooses the next draft."""

    def __init__(
        self, name: str, head: DraftHead, config: WorkerConfig, device: str, vocab_size: int, identity: str
    ) -> None:
        self._name, self._head, self._device = name, head, device
        self._block_size = config.block_size
        self.hidden_layers = head.hidden_layers
        self.cache: DraftCache = DraftCache(head.kv_layout(config.block_size), config, device)
        (group,) = self.cache.layout.groups
        self.kv_head = KVHead(name=identity, num_layers=len(group.layers), parts=group.parts)
        self._vocab_size = vocab_size
        self._attention: AttentionBackend | None = None
        self._places: dict[str, int] = {}
        self._features_RE = torch.zeros(0)

    def make_storage(self, num_pages: int) -> None:
        self.storage = self.cache.make(num_pages)
        self._attention = attention_for(self.storage)

    @torch.inference_mode()
    def head_computed(self, batch: Batch, first_hidden: tuple[int, ...]) -> StepOutput:
        """Makes entries of positions that the target's last step computed; a row's begin at `first_hidden` there."""
        assert self.hidden is not None, "the head reads the hidden states of no runner"
        places = [
            first + place
            for first, row in zip(first_hidden, batch.rows, strict=True)
            for place in range(row.num_tokens)
        ]
        places_T = to_device(np.array(places), self._device)
        return self._run(batch, self._head.features(self.hidden, places_T))

    @torch.inference_mode()
    def head_next(self, batch: Batch) -> StepOutput:
        """Makes the entry that follows each drafted row."""
        places = [self._places[row.request_id] for row in batch.rows]
        return self._run(batch, self._features_RE.index_select(0, to_device(np.array(places), self._device)))

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        limits = self.cache.limits(max_len=self._head.max_len, vocab_size=self._vocab_size)
        runner = leader.everywhere(self)
        return HeadProposer(self._name, runner, limits, clock=time.perf_counter, headless=headless)

    def _run(self, batch: Batch, features_TE: torch.Tensor) -> StepOutput:
        assert self._attention is not None, "the head has no cache yet"
        packed = pack(batch, block_size=self._block_size, sampled={})
        inputs = model_inputs(packed, self._device, torch.zeros(0))
        self._attention.begin(inputs.attention)
        logits_RV, self._features_RE = self._head.forward(inputs, features_TE, self._attention)
        sampling = [row for row in batch.rows if row.sample is not None]
        self._places = {row.request_id: place for place, row in enumerate(sampling)}
        samples = [row.sample for row in sampling if row.sample is not None]
        ids = iter(drafted_ids(logits_RV, samples, self._head.target_ids_V, self._vocab_size) if samples else ())
        return StepOutput(
            rows=tuple([_drafted(next(ids)) if row.sample is not None else RowOutput() for row in batch.rows])
        )


class MedusaDrafting(Drafting):
    """Computes each draft from one hidden state, without KV."""

    def __init__(self, heads: MedusaHeads, device: str, vocab_size: int) -> None:
        self._heads, self._device, self._vocab_size = heads, device, vocab_size
        self.hidden_layers = heads.hidden_layers

    @torch.inference_mode()
    def medusa(self, places: tuple[int, ...], samples: tuple[tuple[Sample, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Each head drafts a token for every sequence, from its hidden state at `places` of the last step, with the
        head's `samples`."""
        assert self.hidden is not None, "the heads read the hidden states of no runner"
        (layer,) = self.hidden_layers
        hidden_RE = self.hidden.at(layer).index_select(0, to_device(np.array(places), self._device))
        logits = self._heads.logits(hidden_RE, len(samples))
        drawn = [
            drafted_ids(one_RV, of_head, None, self._vocab_size)
            for one_RV, of_head in zip(logits, samples, strict=True)
        ]
        return tuple([tuple(ids) for ids in drawn])

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        return MedusaProposer(leader.everywhere(self), len(self._heads), clock=time.perf_counter)


def _drafted(token_id: int) -> RowOutput:
    return RowOutput(token_ids=(token_id,) if token_id != _NONE else ())


def drafted_ids(
    logits_RV: torch.Tensor, samples: Sequence[Sample], target_ids_V: torch.Tensor | None, vocab_size: int
) -> list[int]:
    """The target's id of a token for each row of float32 logits; -1 for logits that are not finite. `target_ids_V`: the
    target's id of each token of the head."""
    if all(each.params.temperature <= 0 and not each.params.logit_bias for each in samples):
        ids_R = logits_RV.argmax(dim=-1)
        return (ids_R if target_ids_V is None else target_ids_V[ids_R]).tolist()
    if target_ids_V is not None:
        whole_RV = logits_RV.new_full((len(logits_RV), vocab_size), -torch.inf)
        whole_RV[:, target_ids_V] = logits_RV
        whole_RV[logits_RV[:, 0].isnan()] = torch.nan
        logits_RV = whole_RV
    return [out.token_ids[0] if out.token_ids else -1 for out in sample(logits_RV, samples).fetch()]
