"""Multi-token prediction: the layer behind the decoder's, as DeepSeek-V3 (arXiv 2412.19437, 2.2) and GLM-4-MoE have it.

    eh_proj(norm(embedding), norm(last norm's output)) ──▶ a decoder layer ──▶ norm ──▶ the target's head

Only the first such layer is used; it continues its own output for further drafts. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from msgspec.structs import replace as with_values

from protos.values import KVLayout
from workers.attention.backend import AttentionBackend
from workers.models.decoder import Decoder, DecoderLayer, ModelInputs, rotations_of
from workers.models.layers.linear_layers import ColumnParallel
from workers.models.layers.norm import norm_of
from workers.models.model_config import ModelConfig
from workers.parallel.group import Solo
from workers.speculation.heads.draft_head import fill_head
from workers.speculation.proposer import HiddenStates
from workers.weights.encoding import LayerContext, Projection
from workers.weights.registry import encodings_of, open_source
from workers.weights.slots import Slot


def load_mtp(path: str, target: Decoder) -> MTPHead:
    """The layer for multi-token prediction in the target's own checkpoint, packed. Raises BadCheckpoint for missing
    tensors."""
    config = target.config
    with open_source(Path(path)) as source:
        context = replace(target.context, encodings=encodings_of(config.weight_format, source))
        head = MTPHead(_with_one_more_layer(config), context, target)
        fill_head(path, head, source, unused=source.names())
    head.pack()
    return head


def _with_one_more_layer(config: ModelConfig) -> ModelConfig:
    """A config with one more layer like the last."""
    experts = config.experts
    return replace(
        config,
        num_layers=config.num_layers + 1,
        windows=(*config.windows, config.windows[-1]),
        ropes=(*config.ropes, config.ropes[-1]),
        experts=experts and replace(experts, sparse=(*experts.sparse, experts.sparse[-1])),
    )


class MTPHead:
    """`config` has the layer as its last one."""

    target_ids_V: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, context: LayerContext, target: Decoder) -> None:
        self._config, self._context, self._target = config, context, target
        self._number, size = config.num_layers - 1, config.hidden_size
        prefix = f"model.layers.{self._number}"
        self._project = ColumnParallel(
            replace(context, parallel=Solo()),
            [Projection(name=f"{prefix}.eh_proj", total=size, start=0, size=size)],
            2 * size,
            bias=False,
        )
        self._norm_embedding = norm_of(context, f"{prefix}.enorm", size, config.norm)
        self._norm_features = norm_of(context, f"{prefix}.hnorm", size, config.norm)
        self._layer = DecoderLayer(context, config, self._number)
        self._norm = norm_of(context, f"{prefix}.shared_head.norm", size, config.norm)
        self._rotations = rotations_of(config, context.device)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self._number,)

    @property
    def max_len(self) -> int:
        return self._config.max_model_len

    def kv_layout(self, block_size: int) -> KVLayout:
        dtype = str(self._context.dtype).removeprefix("torch.")
        layout = self._config.kv_layout(block_size=block_size, dtype=dtype, tp=self._context.parallel.size)
        (group,) = layout.groups
        return with_values(layout, groups=(with_values(group, layers=(self._number,)),))

    def features(self, hidden: HiddenStates[torch.Tensor], places_T: torch.Tensor) -> torch.Tensor:
        return hidden.at(self._number).index_select(0, places_T)

    @torch.inference_mode()
    def forward(
        self, inputs: ModelInputs, features_TE: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = self._rotations(inputs.attention, inputs.prompt_lens)[-1]
        embedded_TE = self._target.embed(inputs.token_ids_T)
        read_TE = self._project(
            torch.cat((self._norm_embedding(embedded_TE), self._norm_features(features_TE)), dim=-1)
        )
        delta_TE, stream_TE = self._layer(torch.zeros_like(read_TE), read_TE, rotation, attention)
        rows = inputs.logit_rows
        normed_RE, out_RE = self._norm.add(delta_TE[rows], stream_TE[rows])
        return self._target.logits(normed_RE), out_RE

    def slots(self) -> Iterator[Slot]:
        for part in (self._project, self._norm_embedding, self._norm_features, self._layer, self._norm):
            yield from part.slots()

    def pack(self) -> None:
        self._project.pack()
        self._layer.pack()
