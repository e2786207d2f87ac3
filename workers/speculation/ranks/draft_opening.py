"""Opens what `worker.speculate` names, on every rank."""

from __future__ import annotations

from workers.free_memory import free_ram_bytes
from workers.models.decoder import Decoder
from workers.models.interface import ServedDecoder
from workers.parallel.group import TensorParallel
from workers.speculation.heads.eagle import load_eagle
from workers.speculation.heads.head_files import digest_of
from workers.speculation.heads.medusa import load_medusa
from workers.speculation.heads.mtp import load_mtp
from workers.speculation.ranks.draft_cache import Drafting
from workers.speculation.ranks.draft_needs import check_fits, needs_of
from workers.speculation.ranks.head_drafting import HeadDrafting, MedusaDrafting
from workers.speculation.ranks.served_draft_model import ServedDraftModel
from workers.speculation.registry import SpeculateMode
from workers.worker_config import WorkerConfig


def open_drafting(config: WorkerConfig, target: ServedDecoder, group: TensorParallel, device: str) -> Drafting | None:
    """None if nothing that speculates computes with a model. Raises BadCheckpoint, UnsupportedModel or Misconfigured
    for a model or head that does not fit the target."""
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
