"""The one decoder stack: embedding, layers of attention and MLP with pre-norms, logits. The family makes the layers.

Legend: T tokens of the batch (rows packed), E hidden size, V vocabulary, R positions whose logits are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionBackend, AttentionInputs, CosSin
from workers.checkpoint.encoding import LayerContext
from workers.checkpoint.slots import Loadable, Slot
from workers.kernels.cpu.layers import LayerWeights
from workers.models.config import ModelConfig, check_parallel
from workers.models.families.registry import BY_NAME
from workers.models.layers.embedding import Embedding, Head
from workers.models.layers.norm import RMSNorm
from workers.models.layers.rope import Rotation

Through = Callable[[torch.Tensor, torch.Tensor, CosSin, AttentionInputs], None]
"""Takes what a layer adds and the stream it adds it to, each [T, E], from before the first layer to behind the last, in
context. The attention has begun the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """One step. `token_ids_T` int64; `logit_rows` int64, indices into T, in the order the logits are wanted;
    `prompt_lens` for each row of `attention` the length of its sequence's whole prompt, however much of it this
    step computes (some rope scalings depend on it: `workers.models.rope`).
    """

    token_ids_T: torch.Tensor
    attention: AttentionInputs
    logit_rows: torch.Tensor
    prompt_lens: tuple[int, ...]


class Decoder:
    """A model's weights on this rank. Holds no cache and no state between steps: both are the backend's.

    Made by `workers.models.loader.load_model`; the constructor leaves the weights unset.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, *, stored_as: str = "") -> None:
        check_parallel(config, context.parallel.size)
        self.config = config
        self.context = context
        self.stored_as = stored_as  # the encoding of its weights and their bits, for people
        self._embedding = Embedding(context, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self._rotation = Rotation(config.rope, config.head_dim, context.device)
        self._layers = [DecoderLayer(context, config, layer) for layer in range(config.num_layers)]
        self._norm = RMSNorm(context, "model.norm", config.hidden_size, config.norm_eps)
        tied = self._embedding if config.tied_embeddings else None
        self._head = Head(context, config.vocab_size, config.hidden_size, tied=tied)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, attention: AttentionBackend, through: Through | None = None) -> torch.Tensor:
        """Writes the step's keys and values into the backend's cache. Returns logits [R, V], float32, on every rank.

        `through` computes what the layers would with this backend, faster. With tensor parallelism every rank must be
        given the same inputs. Raises WorkerLost when one has gone.
        """
        attention.begin(inputs.attention)
        rotation = self._rotation(inputs.attention, inputs.prompt_lens)
        stream_TE = self._embedding(inputs.token_ids_T)
        delta_TE = torch.zeros_like(stream_TE)
        if through is not None:
            through(delta_TE, stream_TE, rotation, inputs.attention)
        else:
            for layer in self._layers:
                delta_TE, stream_TE = layer(delta_TE, stream_TE, rotation, attention)
        rows = inputs.logit_rows
        normed_RE, _ = self._norm.add(delta_TE[rows], stream_TE[rows])
        return self._head.logits(normed_RE)

    def pack(self) -> None:
        """Lays the loaded weights out as this machine multiplies fastest. `slots` cannot show them afterwards."""
        for layer in self._layers:
            layer.pack()
        self._head.pack()

    def packed_layers(self) -> list[LayerWeights] | None:
        """Weights of every layer, once packed, if compiled code can do all that each of them does."""
        found = [layer.packed() for layer in self._layers]
        weights = [layer for layer in found if layer is not None]
        return weights if len(weights) == len(found) else None

    def slots(self) -> Iterator[Slot]:
        """Where every tensor of the checkpoint goes."""
        parts: list[Loadable] = [self._embedding, *self._layers, self._norm, self._head]
        for part in parts:
            yield from part.slots()


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition is left to the norm that follows it."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        family, prefix = BY_NAME[config.family], f"model.layers.{layer}"
        self._attention_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps)
        self._attention = family.attention(context, f"{prefix}.self_attn", config, layer)
        self._mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self._mlp = family.mlp(context, f"{prefix}.mlp", config, layer)

    def __call__(
        self,
        delta_TE: torch.Tensor,
        stream_TE: torch.Tensor,
        rotation: CosSin,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TE, stream_TE = self._attention_norm.add(delta_TE, stream_TE)
        delta_TE = self._attention(normed_TE, rotation, attention)
        normed_TE, stream_TE = self._mlp_norm.add(delta_TE, stream_TE)
        return self._mlp(normed_TE), stream_TE

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()

    def packed(self) -> LayerWeights | None:
        qkv, out = self._attention.packed_products()
        gate_up, down = self._mlp.packed_products()
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return LayerWeights(
            attention_norm_E=self._attention_norm.weight,
            qkv=qkv,
            head_norms=self._attention.head_norms,
            out=out,
            mlp_norm_E=self._mlp_norm.weight,
            gate_up=gate_up,
            down=down,
            window=self._attention.window,
        )

    def slots(self) -> Iterator[Slot]:
        for part in (self._attention_norm, self._attention, self._mlp_norm, self._mlp):
            yield from part.slots()
