"""EAGLE heads: one layer that continues the target's features (arXiv 2401.15077), and EAGLE-3 (arXiv 2503.01840).

    EAGLE      fc(embedding, last norm's output) ──▶ layer without a norm before it ──▶ the target's head
    EAGLE-3    norm(embedding), norm(fc(inputs of three layers)) ──▶ attention, MLP ──▶ norm ──▶ its own head

Which of the two a checkpoint is follows from its tensors. Names are those of SafeAILab (`midlayer`, `d2t`) and of
vLLM's speculators (`layers.0`). EAGLE-3's own head has the most frequent tokens only: token i of it is the target's
i + d2t[i]. Legend as in `draft_head`, and: H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from protos.errors import BadCheckpoint
from protos.values import KVLayout
from workers.attention.backend import AttentionBackend
from workers.models.decoder import Decoder, ModelInputs, rotations_of
from workers.models.layers.embedding import Embedding, Head
from workers.models.layers.linear_layers import ColumnParallel
from workers.models.layers.mlp import MLP
from workers.models.layers.norm import norm_of
from workers.models.layers.self_attention import SelfAttention
from workers.models.model_config import check_parallel
from workers.parallel.group import Solo
from workers.speculation.heads.draft_head import fill_head
from workers.speculation.heads.eagle_config import LAYER, EagleConfig, eagle_name, read_eagle
from workers.speculation.heads.head_files import open_head
from workers.speculation.proposer import HiddenStates
from workers.weights.encoding import LayerContext, Projection
from workers.weights.registry import encodings_of
from workers.weights.slots import Slot


def load_eagle(path: str, target: Decoder) -> EagleHead:
    """The head in `path` for this target, packed. Raises as `read_eagle`, and BadCheckpoint for missing tensors."""
    with open_head(path, eagle_name) as source:
        eagle = read_eagle(path, target.config, source)
        check_parallel(eagle.model, target.context.parallel.size)
        context = replace(target.context, encodings=encodings_of(None, source), expert_parallel=False)
        head = EagleHead(eagle, context, target)
        fill_head(path, head, source, unused=("t2d", "embed_tokens.weight", "lm_head.weight"))
        head.check_ids(path)
    head.pack()
    return head


class EagleHead:
    def __init__(self, eagle: EagleConfig, context: LayerContext, target: Decoder) -> None:
        config, size = eagle.model, eagle.model.hidden_size
        self._eagle = eagle
        self._context = context
        self._target = target
        whole = replace(context, parallel=Solo())
        self._fc = ColumnParallel(
            whole,
            [Projection(name="fc", total=size, start=0, size=size)],
            eagle.num_features,
            bias=eagle.fc_bias,
        )
        self._embedding = (
            Embedding(context, "embed_tokens", eagle.target.vocab_size, size) if eagle.own_embedding else None
        )
        three = eagle.is_eagle3
        self._attention = SelfAttention(
            context, f"{LAYER}.self_attn", config, 0, num_inputs=2 * size if three else size
        )
        self._mlp = MLP(context, f"{LAYER}.mlp", config)
        self._norm_after = norm_of(context, f"{LAYER}.post_attention_layernorm", size, config.norm)
        self._norm_embedding = norm_of(context, f"{LAYER}.input_layernorm", size, config.norm) if three else None
        self._norm_features = norm_of(context, f"{LAYER}.hidden_norm", size, config.norm) if three else None
        self._norm = norm_of(context, "norm", size, config.norm) if three else None
        self._head = Head(context, config.vocab_size, size, tied=None) if three else None
        self._offsets_V = torch.zeros(config.vocab_size, dtype=torch.int64) if eagle.maps_ids else None
        self._rotations = rotations_of(config, context.device)
        self.target_ids_V: torch.Tensor | None = None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._eagle.hidden_layers

    @property
    def max_len(self) -> int:
        return self._eagle.model.max_model_len

    def kv_layout(self, block_size: int) -> KVLayout:
        dtype = str(self._context.dtype).removeprefix("torch.")
        return self._eagle.model.kv_layout(block_size=block_size, dtype=dtype, tp=self._context.parallel.size)

    def features(self, hidden: HiddenStates[torch.Tensor], places_T: torch.Tensor) -> torch.Tensor:
        states = [hidden.at(layer).index_select(0, places_T) for layer in self.hidden_layers]
        return self._fc(torch.cat(states, dim=-1)) if self._eagle.is_eagle3 else states[0]

    @torch.inference_mode()
    def forward(
        self, inputs: ModelInputs, features_TE: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (rotation,) = self._rotations(inputs.attention, inputs.prompt_lens)
        embedded_TE = (self._embedding or self._target.embed)(inputs.token_ids_T)
        if self._norm_features is not None and self._norm_embedding is not None:
            normed_TE = self._norm_features(features_TE)
            stream_TE = normed_TE if self._eagle.norm_before_residual else features_TE
            read_TI = torch.cat((self._norm_embedding(embedded_TE), normed_TE), dim=-1)
        else:
            stream_TE = read_TI = self._fc(torch.cat((embedded_TE, features_TE), dim=-1))
        normed_TE, stream_TE = self._norm_after.add(self._attention(read_TI, rotation, attention), stream_TE)
        out_RE = (self._mlp(normed_TE) + stream_TE)[inputs.logit_rows]
        if self._norm is None or self._head is None:
            return self._target.logits(out_RE), out_RE
        return self._head.logits(self._norm(out_RE)), out_RE

    def slots(self) -> Iterator[Slot]:
        layer = self._attention, self._mlp, self._norm_after
        others = self._embedding, self._norm_embedding, self._norm_features, self._norm, self._head
        for part in (self._fc, *layer, *(each for each in others if each is not None)):
            yield from part.slots()
        if self._offsets_V is not None:
            shape = tuple(self._offsets_V.shape)
            yield Slot(name="d2t", shape=shape, target=self._offsets_V, dtypes=frozenset(("I64", "I32")))

    def check_ids(self, path: str) -> None:
        """Raises BadCheckpoint if d2t leads beyond the target's vocabulary."""
        if self._offsets_V is None:
            return
        ids_V = torch.arange(len(self._offsets_V)) + self._offsets_V
        least, most = int(ids_V.min()), int(ids_V.max())
        if not 0 <= least <= most < self._eagle.target.vocab_size:
            raise BadCheckpoint(
                f"{path}: d2t leads to tokens {least} to {most}, the model has {self._eagle.target.vocab_size}"
            )
        self.target_ids_V = ids_V.to(self._context.device)

    def pack(self) -> None:
        parts = (self._fc, self._attention, self._mlp)
        for part in parts:
            part.pack()
        if self._head is not None:
            self._head.pack()
