"""Opens what `worker.speculate` names, on every rank."""

from __future__ import annotations

import logging
import time

from workers.attention.registry import attention_for
from workers.batch import Batch, StepOutput
from workers.free_memory import free_ram_bytes
from workers.models.decoder import Decoder
from workers.models.interface import ServedConfig, ServedDecoder
from workers.models.served import layout_of, load_served, read_served
from workers.parallel.group import TensorParallel
from workers.parallel.ranks import Leader
from workers.runner.torch_runner import TorchRunner
from workers.speculation.heads.eagle import load_eagle
from workers.speculation.heads.head_files import digest_of
from workers.speculation.heads.medusa import load_medusa
from workers.speculation.heads.mtp import load_mtp
from workers.speculation.proposer import Proposer
from workers.speculation.proposers.draft_model_proposer import DraftModelProposer
from workers.speculation.ranks.draft_cache import DraftCache, Drafting
from workers.speculation.ranks.draft_needs import check_fits, draft_dtype, needs_of
from workers.speculation.ranks.head_drafting import HeadDrafting, MedusaDrafting
from workers.speculation.registry import SpeculateMode
from workers.worker_config import WorkerConfig

log = logging.getLogger("baton.worker")


class ServedDraftModel(Drafting):
    """Loads the checkpoint `path`, which `workers.speculation.ranks.draft_needs` has checked. Raises BadCheckpoint or
    UnsupportedModel."""

    def __init__(
        self, path: str, config: WorkerConfig, target: ServedConfig, group: TensorParallel, device: str
    ) -> None:
        model = read_served(path)
        dtype = draft_dtype(config, model)
        layout = layout_of(model, "auto", block_size=config.block_size, dtype=dtype, tp=config.tp)
        self.cache: DraftCache = DraftCache(layout, config, device)
        self._block_size = config.block_size
        self._vocab_size = min(model.vocab_size, target.vocab_size)
        self._max_len = model.max_model_len
        self._decoder = load_served(
            path,
            device=device,
            dtype=dtype,
            quantize="off",
            parallel=group,
            expert_parallel=config.expert_parallel,
            on_progress=None,
        )
        self._runner: TorchRunner | None = None
        log.info("drafts of next tokens come from %s: %s", path, self._decoder.stored_as)

    def make_storage(self, num_pages: int) -> None:
        storage = self.cache.make(num_pages)
        self._runner = TorchRunner(self._decoder, attention_for(storage), block_size=self._block_size)

    def draft(self, batch: Batch) -> StepOutput:
        """Computes a step of the draft model. Only rank 0's output has tokens."""
        assert self._runner is not None, "the draft model has no cache yet"
        return self._runner.run(batch)

    def proposer(self, leader: Leader, headless: set[int]) -> Proposer:
        limits = self.cache.limits(max_len=self._max_len, vocab_size=self._vocab_size)
        return DraftModelProposer(leader.everywhere(self), limits, clock=time.perf_counter)


def open_drafting(config: WorkerConfig, target: ServedDecoder, group: TensorParallel, device: str) -> Drafting | None:
    """Returns None if no proposer computes with a model. Raises BadCheckpoint, UnsupportedModel or Misconfigured for a
    model or head that does not fit the target."""
    mode = SpeculateMode.of(config.speculate)
    if not mode.is_by_model:
        return None
    needs = needs_of(config, target.config, str(target.context.dtype).removeprefix("torch."))
    if device == "cpu":
        check_fits(config, needs, free_ram_bytes())
    if mode.kind == "model":
        return ServedDraftModel(mode.path, config, target.config, group, device)
    assert isinstance(target, Decoder), "heads of a decoder that shows no hidden states are refused"
    vocab_size = target.config.vocab_size
    if mode.kind == "medusa":
        return MedusaDrafting(load_medusa(mode.path, target), device, vocab_size)
    head = load_mtp(config.model, target) if mode.kind == "mtp" else load_eagle(mode.path, target)
    identity = f"{mode.kind}:{digest_of(mode.path)}" if mode.path else mode.kind
    return HeadDrafting(mode.kind, head, config, device, vocab_size, identity)
