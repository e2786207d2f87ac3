"""Medusa heads (arXiv 2401.10774): head i predicts the token i + 2 positions on from the last norm's output h.

    h ──▶ x + SiLU(W x + b), `medusa_num_layers` times ──▶ a head of its own

Only matching drafts are accepted here. The paper's typical acceptance changes the distribution of answers, and is
refused. Tensors are those of `medusa_lm_head`: "I.L.linear.weight", "I.L.linear.bias" and "I.N.weight".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from workers.models.decoder import Decoder
from workers.models.layers.linear_layers import ColumnParallel
from workers.parallel.group import Solo
from workers.speculation.heads.draft_head import fill_head
from workers.speculation.heads.eagle_config import OTHER_HEAD
from workers.speculation.heads.head_files import open_head
from workers.weights.encoding import LayerContext, Projection
from workers.weights.registry import encodings_of
from workers.weights.slots import Slot

_LOSSY = ("typical_acceptance", "posterior_threshold", "posterior_alpha")


def load_medusa(path: str, target: Decoder) -> MedusaHeads:
    """The heads in `path`, packed; every rank has all of them. Raises BadCheckpoint or UnsupportedModel for heads that
    cannot be read, Misconfigured for those of another target."""
    fields = Fields.of_file(open_model(path), "config.json")
    for name in _LOSSY:
        if fields.raw(name):
            raise fields.unserved(
                name, "drafts that match are accepted, typical ones would change answers", fix="Remove the field"
            )
    num_layers = fields.integer_or("medusa_num_layers", 1)
    with open_head(path, lambda name: name.removeprefix("medusa_head.")) as source:
        numbers = {name.split(".")[0] for name in source.names()}
        num_heads = fields.integer_or("medusa_num_heads", len(numbers))
        stored = min(num_heads, len(numbers))
        if stored < num_heads and stored:
            raise BadCheckpoint(
                f"{fields.where}: medusa_num_heads is {num_heads}, and there are tensors of {stored} heads"
            )
        if not stored or not all(str(number) in numbers for number in range(stored)):
            raise BadCheckpoint(f"{path} has no tensors of Medusa heads, as '0.0.linear.weight' and '0.1.weight'")
        last = f"0.{num_layers}.weight"
        shape = source.describe(last).shape if last in source.names() else None
        wanted = (target.config.vocab_size, target.config.hidden_size)
        if shape is not None and shape != wanted:
            raise Misconfigured(
                f"the heads in {path} are {shape}, tokens by hidden size, the model is {wanted}: {OTHER_HEAD}",
                param="speculate",
            )
        context = replace(target.context, parallel=Solo(), encodings=encodings_of(None, source))
        heads = MedusaHeads(context, target.config.num_layers, *wanted, num_heads=stored, num_layers=num_layers)
        fill_head(path, heads, source)
    heads.pack()
    return heads


class MedusaHeads:
    """Legend: R positions, E hidden size, V vocabulary, I heads."""

    def __init__(
        self, context: LayerContext, layer: int, vocab_size: int, hidden_size: int, *, num_heads: int, num_layers: int
    ) -> None:
        self.hidden_layers = (layer,)

        def linear(name: str, size: int, *, bias: bool) -> ColumnParallel:
            whole = Projection(name=name, total=size, start=0, size=size)
            return ColumnParallel(context, [whole], hidden_size, bias=bias)

        self._heads = [
            (
                [linear(f"{head}.{layer}.linear", hidden_size, bias=True) for layer in range(num_layers)],
                linear(f"{head}.{num_layers}", vocab_size, bias=False),
            )
            for head in range(num_heads)
        ]

    def __len__(self) -> int:
        return len(self._heads)

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
        """[R, V] in float32 for each of the first `num_heads` heads."""
        logits = []
        for blocks, last in self._heads[:num_heads]:
            x_RE = hidden_RE
            for block in blocks:
                x_RE = x_RE + F.silu(block(x_RE))
            logits.append(last(x_RE).float())
        return logits

    def slots(self) -> Iterator[Slot]:
        for blocks, last in self._heads:
            for part in (*blocks, last):
                yield from part.slots()

    def pack(self) -> None:
        for blocks, last in self._heads:
            for part in (*blocks, last):
                part.pack()
