"""EAGLE heads: one layer that continues the target's features (arXiv 2401.15077), and EAGLE-3 (arXiv 2503.01840).

    EAGLE      fc(embedding, last norm's output) ──▶ layer without a norm before it ──▶ the target's head
    EAGLE-3    norm(embedding), norm(fc(inputs of three layers)) ──▶ attention, MLP ──▶ norm ──▶ its own head

Which of the two a checkpoint is follows from its tensors. Names are those of SafeAILab (`midlayer`, `d2t`) and of
vLLM's speculators (`layers.0`). EAGLE-3's own head has the most frequent tokens only: token i of it is the target's
i + d2t[i]. Legend as in `base`, and: H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.model_files.fields import Fields
from protos.model_files.opening import open_model
from protos.values import KVLayout
from workers.attention.base import AttentionBackend
from workers.checkpoint.encoding import LayerContext, Projection
from workers.checkpoint.registry import encodings_of
from workers.checkpoint.slots import Slot
from workers.checkpoint.source import WeightSource
from workers.models.config import ModelConfig, check_parallel, config_of
from workers.models.decoder import Decoder, ModelInputs, rotations_of
from workers.models.heads.published import fill_head, open_head
from workers.models.layers.attention import SelfAttention
from workers.models.layers.embedding import Embedding, Head
from workers.models.layers.linear import ColumnParallel
from workers.models.layers.mlp import GatedMLP
from workers.models.layers.norm import norm_of
from workers.parallel.group import Solo
from workers.speculation.base import HiddenStates

_LAYER = "layers.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """`model` has the sizes of the head's layer, its `vocab_size` the tokens of the head's own vocabulary."""

    model: ModelConfig
    target: ModelConfig
    is_eagle3: bool
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool
    fc_bias: bool
    own_embedding: bool
    maps_ids: bool

    @property
    def num_features(self) -> int:
        """Inputs of `fc`."""
        if self.is_eagle3:
            return self.target.hidden_size * len(self.hidden_layers)
        return self.model.hidden_size + self.target.hidden_size


def read_eagle(path: str, target: ModelConfig, source: WeightSource) -> EagleConfig:
    """Raises BadCheckpoint or UnsupportedModel for a head that cannot be read, Misconfigured for one of another
    target."""
    files = open_model(path)
    fields = Fields.of_file(files, "config.json")
    layer = fields.inner("transformer_layer_config") if "transformer_layer_config" in fields else fields
    names = frozenset(source.names())
    is_eagle3 = f"{_LAYER}.hidden_norm.weight" in names
    num_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    if num_layers != 1:
        raise UnsupportedModel(
            f"{path} has tensors of {num_layers} layers: an EAGLE head has one (midlayer or layers.0)"
        )
    vocab_size = layer.integer_or("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise Misconfigured(
            f"speculate: the head {path} is for {vocab_size} tokens, the model has {target.vocab_size}: choose a head "
            "that was trained for this model",
            param="speculate",
        )
    own_size = source.describe("lm_head.weight").shape[0] if "lm_head.weight" in names else vocab_size
    model = config_of(
        layer.replaced(architectures=["LlamaForCausalLM"], num_hidden_layers=1, tie_word_embeddings=False).over(
            {"vocab_size": vocab_size, "max_position_embeddings": target.max_position}
        ),
        files,
    )
    if model.weight_format is not None:
        raise UnsupportedModel(f"{path}: quantised heads are not served: choose one in bfloat16, float16 or float32")
    found = EagleConfig(
        model=replace(model, vocab_size=own_size),
        target=target,
        is_eagle3=is_eagle3,
        hidden_layers=_hidden_layers(fields, target) if is_eagle3 else (target.num_layers,),
        norm_before_residual=fields.flag("norm_before_residual", default=layer.flag("norm_before_residual")),
        fc_bias="fc.bias" in names,
        own_embedding="embed_tokens.weight" in names,
        maps_ids="d2t" in names,
    )
    _check(path, found, names)
    return found


def _hidden_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """By default those of the paper, which count from 0: 2, the middle, and the third from the end."""
    key, count = "eagle_aux_hidden_state_layer_ids", target.num_layers
    given = fields.raw(key) or fields.inner("eagle_config").raw(key)
    layers = given if given is not None else [2, count // 2, count - 3]
    if not isinstance(layers, list) or len(layers) != 3 or not all(isinstance(one, int) for one in layers):
        raise BadCheckpoint(f"{fields.where}: {key} is {layers!r}: it must be a list of 3 layers")
    if not all(0 <= one <= count for one in layers):
        raise BadCheckpoint(
            f"{fields.where}: {key} is {layers}: the model has {count} layers, name 3 from 0 to {count}"
        )
    return tuple(layers)


def _check(path: str, eagle: EagleConfig, names: frozenset[str]) -> None:
    if not eagle.own_embedding and eagle.model.hidden_size != eagle.target.hidden_size:
        raise Misconfigured(
            f"speculate: the head {path} has hidden_size {eagle.model.hidden_size}, the model "
            f"{eagle.target.hidden_size}, and the head has no embedding of its own: choose a head that "
            "was trained for this model",
            param="speculate",
        )
    if eagle.is_eagle3 and "lm_head.weight" not in names:
        raise BadCheckpoint(f"{path} lacks 'lm_head.weight': an EAGLE-3 head has a head of its own")
    if eagle.is_eagle3 and not eagle.maps_ids and eagle.model.vocab_size != eagle.target.vocab_size:
        raise BadCheckpoint(
            f"{path} lacks 'd2t', which maps its {eagle.model.vocab_size} tokens to the model's "
            f"{eagle.target.vocab_size}"
        )


def load_eagle(path: str, target: Decoder) -> EagleHead:
    """The head in `path` for this target, packed. Raises as `read_eagle`, and BadCheckpoint for missing tensors."""
    with open_head(path, _renamed) as source:
        eagle = read_eagle(path, target.config, source)
        check_parallel(eagle.model, target.context.parallel.size)
        context = replace(target.context, encodings=encodings_of(None, source), expert_parallel=False)
        head = EagleHead(eagle, context, target)
        fill_head(path, list(head.slots()), source, unused=("t2d", "embed_tokens.weight", "lm_head.weight"))
        head.check_ids(path)
    head.pack()
    return head


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", f"{_LAYER}.", 1) if name.startswith("midlayer.") else name


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
            context, f"{_LAYER}.self_attn", config, 0, num_inputs=2 * size if three else size
        )
        self._mlp = GatedMLP(context, f"{_LAYER}.mlp", config, 0)
        self._norm_after = norm_of(context, f"{_LAYER}.post_attention_layernorm", size, config.norm)
        self._norm_embedding = norm_of(context, f"{_LAYER}.input_layernorm", size, config.norm) if three else None
        self._norm_features = norm_of(context, f"{_LAYER}.hidden_norm", size, config.norm) if three else None
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
        attention.begin(inputs.attention)
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
        for part in (self._fc, *layer, *(one for one in others if one is not None)):
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
                f"{path}: d2t leads to token {least if least < 0 else most}, the model has tokens 0 to "
                f"{self._eagle.target.vocab_size - 1}: it belongs to another head"
            )
        self.target_ids_V = ids_V.to(self._context.device)

    def pack(self) -> None:
        parts = (self._fc, self._attention, self._mlp)
        for part in parts:
            part.pack()
        if self._head is not None:
            self._head.pack()
