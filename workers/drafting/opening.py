"""Opens what `worker.speculate` names, on every rank."""

from __future__ import annotations

from pathlib import Path

from protos.errors import BadCheckpoint, Misconfigured
from workers.config import WorkerConfig
from workers.drafting.base import Drafting
from workers.drafting.draft_model import ServedDraftModel
from workers.drafting.heads import HeadDrafting, MedusaDrafting
from workers.models.decoder import Decoder
from workers.models.heads.eagle import load_eagle
from workers.models.heads.medusa import load_medusa
from workers.models.heads.mtp import load_mtp
from workers.models.heads.published import digest_of
from workers.models.interface import ServedDecoder
from workers.parallel.group import TensorParallel
from workers.speculation.registry import SpeculateMode


def open_drafting(config: WorkerConfig, target: ServedDecoder, group: TensorParallel, device: str) -> Drafting | None:
    """None if nothing that speculates computes with a model. Raises BadCheckpoint, UnsupportedModel or Misconfigured
    for a model or head that does not fit the target."""
    mode = SpeculateMode.of(config.speculate)
    if not mode.is_by_model:
        return None
    if mode.path and not Path(mode.path).exists():
        raise BadCheckpoint(
            f"speculate is {config.speculate}, and there is no {mode.path}: give the folder of a checkpoint, as "
            f"{mode.kind}:/models/draft"
        )
    if mode.kind == "model":
        return ServedDraftModel(mode.path, config, target.config, group, device)
    if not isinstance(target, Decoder):
        raise Misconfigured(
            f"speculate is {mode.kind}: heads read hidden states, and a decoder of transformers "
            f"({target.config.family}) shows none: choose a draft model (model:PATH), ngram or suffix",
            param="speculate",
        )
    vocab_size = target.config.vocab_size
    if mode.kind == "medusa":
        return MedusaDrafting(load_medusa(mode.path, target), device, vocab_size)
    head = load_mtp(config.model, target) if mode.kind == "mtp" else load_eagle(mode.path, target)
    identity = f"{mode.kind}:{digest_of(mode.path)}" if mode.path else mode.kind
    return HeadDrafting(mode.kind, head, config, device, vocab_size, identity)
