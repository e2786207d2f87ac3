"""The one decoder stack: embedding, layers of attention and MLP, logits. The family makes the layers.

Legend: T tokens of the batch (rows packed), E hidden size, V vocabulary, R positions whose logits are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionBackend, AttentionInputs, CosSin
from workers.checkpoint.encoding import LayerContext
from workers.checkpoint.slots import Loadable, Slot
from workers.kernels.cpu.layers import LayerForm, LayerWeights
from workers.kernels.cpu.norms import CompiledNorm
from workers.models.config import ModelConfig, check_parallel
from workers.models.layers.embedding import Embedding, Head
from workers.models.layers.experts import MixtureOfExperts
from workers.models.layers.norm import LayerNorm, RMSNorm, norm_of
from workers.models.layers.rope import Rotations

Through = Callable[[torch.Tensor, torch.Tensor, Sequence[CosSin], AttentionInputs], None]
"""Takes what a layer adds and the stream it adds it to, each [T, E], from before the first layer to behind the last, in
context, with the rotation of each layer. The attention has begun the step."""


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
        check_parallel(config, context.parallel.size, expert_parallel=context.expert_parallel)
        self.config = config
        self.context = context
        self.stored_as = stored_as  # the encoding of its weights and their bits, for people
        self._embedding = embedding_of(context, config)
        self._rotations = rotations_of(config, context.device)
        self._layers = [DecoderLayer(context, config, layer) for layer in range(config.num_layers)]
        self._norm = last_norm_of(context, config)
        self._head = head_of(context, config, self._embedding if config.tied_embeddings else None)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, attention: AttentionBackend, through: Through | None = None) -> torch.Tensor:
        """Writes the step's keys and values into the backend's cache. Returns logits [R, V], float32, on every rank.

        `through` computes what the layers would with this backend, faster. With tensor parallelism every rank must be
        given the same inputs. Raises WorkerLost when one has gone.
        """
        attention.begin(inputs.attention)
        rotations = self._rotations(inputs.attention, inputs.prompt_lens)
        stream_TE = self._embedding(inputs.token_ids_T)
        delta_TE = torch.zeros_like(stream_TE)
        if through is not None:
            through(delta_TE, stream_TE, rotations, inputs.attention)
        else:
            for layer, rotation in zip(self._layers, rotations, strict=True):
                delta_TE, stream_TE = layer(delta_TE, stream_TE, rotation, attention)
        rows = inputs.logit_rows
        normed_RE, _ = self._norm.add(delta_TE[rows], stream_TE[rows])
        return self._head.logits(normed_RE)

    def pack(self) -> None:
        """Lays the loaded weights out as this machine multiplies fastest. `slots` cannot show them afterwards."""
        for layer in self._layers:
            layer.pack()
        self._head.pack()

    def expert_counts(self) -> list[torch.Tensor]:
        """Of each layer with experts the tokens that chose each one, int64 [experts]. On a GPU they stay 0."""
        return [counts_X for layer in self._layers if (counts_X := layer.expert_counts) is not None]

    @property
    def waits(self) -> bool:
        """Whether a packed layer waits for its device."""
        return any(layer.waits for layer in self._layers)

    def packed_layers(self) -> list[LayerWeights] | None:
        """Weights of every layer, once packed, if compiled code can do all that each of them does."""
        found = [layer.packed() for layer in self._layers]
        weights = [layer for layer in found if layer is not None]
        return weights if len(weights) == len(found) else None

    def layer_form(self) -> LayerForm | None:
        """What all layers do alike, if compiled code can do it."""
        config, norm = self.config, self.config.norm
        if config.activation not in ("silu", "gelu_tanh"):
            return None
        wide = CompiledNorm.WIDE if norm.wide and self.context.dtype != torch.float32 else CompiledNorm.ROUNDED
        ropes = list(dict.fromkeys(config.ropes))
        return LayerForm(
            hidden_size=config.hidden_size,
            norm=CompiledNorm.CENTRED if norm.centred else wide,
            eps=norm.eps,
            gelu=config.activation == "gelu_tanh",
            attention_scale=config.attention_scale,
            softcap=config.scales.attention_softcap,
            residual=config.scales.residual,
            parallel=config.spec.places.parallel,
            heads_together=config.qk_norm == "all",
            ropes=tuple(ropes.index(rope) for rope in config.ropes),
        )

    def slots(self) -> Iterator[Slot]:
        """Where every tensor of the checkpoint goes."""
        parts: list[Loadable] = [self._embedding, *self._layers, self._norm, self._head]
        for part in parts:
            yield from part.slots()


class DecoderLayer:
    """One layer, its norms where `NormPlaces` has them; each addition is left to what follows it."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        family, prefix = config.spec, f"model.layers.{layer}"
        places = family.places

        def norm(name: str | None) -> RMSNorm | LayerNorm | None:
            return norm_of(context, f"{prefix}.{name}", config.hidden_size, config.norm) if name else None

        self._before_attention, self._after_attention = norm(places.before_attention), norm(places.after_attention)
        self._before_mlp, self._after_mlp = norm(places.before_mlp), norm(places.after_mlp)
        self._parallel_halves = places.parallel
        self._scale = config.scales.residual
        self._attention = family.attention(context, f"{prefix}.self_attn", config, layer)
        self._mlp = family.mlp(context, f"{prefix}.mlp", config, layer)

    def __call__(
        self,
        delta_TE: torch.Tensor,
        stream_TE: torch.Tensor,
        rotation: CosSin,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TE, stream_TE = _add(self._before_attention, delta_TE, stream_TE)
        delta_TE = self._attention(normed_TE, rotation, attention)
        if self._parallel_halves:
            return self._scaled(delta_TE + self._mlp(normed_TE)), stream_TE
        delta_TE = self._scaled(delta_TE if self._after_attention is None else self._after_attention(delta_TE))
        normed_TE, stream_TE = _add(self._before_mlp, delta_TE, stream_TE)
        delta_TE = self._mlp(normed_TE)
        return self._scaled(delta_TE if self._after_mlp is None else self._after_mlp(delta_TE)), stream_TE

    def _scaled(self, delta_TE: torch.Tensor) -> torch.Tensor:
        return delta_TE if self._scale == 1.0 else delta_TE * self._scale

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()

    @property
    def waits(self) -> bool:
        return self._mlp.waits

    @property
    def expert_counts(self) -> torch.Tensor | None:
        return self._mlp.counts_X if isinstance(self._mlp, MixtureOfExperts) else None

    def packed(self) -> LayerWeights | None:
        """None where compiled layers do not do what this one does."""
        norms = self._before_attention, self._after_attention, self._before_mlp, self._after_mlp
        biases = [norm.bias for norm in norms if isinstance(norm, LayerNorm)]
        if not self._attention.compilable or any(bias is not None for bias in biases):
            return None
        qkv, out = self._attention.packed_products()
        feed_forward = self._mlp.packed_products()
        if qkv is None or out is None or feed_forward is None:
            return None
        gate_up, down = feed_forward
        weights = [None if norm is None else norm.weight for norm in norms]
        before_attention, after_attention, before_mlp, after_mlp = weights
        return LayerWeights(
            attention_norm_E=before_attention,
            qkv=qkv,
            head_norms=self._attention.head_norms,
            out=out,
            attention_after_E=after_attention,
            mlp_norm_E=before_mlp,
            gate_up=gate_up,
            down=down,
            mlp_after_E=after_mlp,
            window=self._attention.window,
        )

    def slots(self) -> Iterator[Slot]:
        norms = self._before_attention, self._after_attention, self._before_mlp, self._after_mlp
        parts: list[Loadable] = [norm for norm in norms if norm is not None]
        for part in (*parts, self._attention, self._mlp):
            yield from part.slots()


def _add(
    norm: RMSNorm | LayerNorm | None, delta_TE: torch.Tensor, stream_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a half of a layer reads, the stream), after `delta_TE` has been added to the stream."""
    if norm is not None:
        return norm.add(delta_TE, stream_TE)
    stream_TE = delta_TE + stream_TE
    return stream_TE, stream_TE


def embedding_of(context: LayerContext, config: ModelConfig) -> Embedding:
    scale = config.scales.embedding
    return Embedding(context, "model.embed_tokens", config.vocab_size, config.hidden_size, scale=scale)


def last_norm_of(context: LayerContext, config: ModelConfig) -> RMSNorm | LayerNorm:
    return norm_of(context, "model.norm", config.hidden_size, config.norm)


def head_of(context: LayerContext, config: ModelConfig, tied: Embedding | None) -> Head:
    """`tied` is the embedding, where the model has no head of its own."""
    scales = config.scales
    return Head(
        context,
        config.vocab_size,
        config.hidden_size,
        tied=tied,
        scale=scales.logits,
        softcap=scales.logits_softcap,
    )


def rotations_of(config: ModelConfig, device: str) -> Rotations:
    return Rotations(config.ropes, config.head_dim, config.rotary_dim, device)
