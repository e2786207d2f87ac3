"""The one decoder stack: embedding, layers of attention and MLP, logits. The family makes the layers.

Legend: T tokens of the batch (rows packed), E hidden size, V vocabulary, R positions whose logits are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from workers.adapters.linear import AdaptableLinear
from workers.adapters.low_rank import AdapterTokens, StepAdapters
from workers.attention.backend import AttentionBackend, AttentionInputs, CosSin
from workers.kernels.cpu.layers import LayerForm, LayerWeights, NormTensors
from workers.kernels.cpu.norms import ACTIVATIONS, CompiledNorm
from workers.models.filling import LoadPart
from workers.models.layers.embedding import Embedding, Head
from workers.models.layers.expert_layer import MixtureOfExperts, feed_forward
from workers.models.layers.growth import StepGrowth
from workers.models.layers.latent_attention import LatentAttention
from workers.models.layers.layer_parts import AttentionLayer
from workers.models.layers.linear_layers import sums_overlap
from workers.models.layers.norm import LayerNorm, RMSNorm, norm_of
from workers.models.layers.rope import Rotations
from workers.models.layers.self_attention import SelfAttention
from workers.models.model_config import ModelConfig, check_parallel
from workers.weights.encoding import LayerContext
from workers.weights.slots import Slot


class Taps:
    """Keeps what enters layers of a step, [T, E]. Layer `num_layers` is the output of the last norm."""

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self.states: dict[int, torch.Tensor] = {}

    def take(self, layer: int, delta_TE: torch.Tensor, stream_TE: torch.Tensor) -> None:
        if layer in self.layers:
            self.states[layer] = delta_TE + stream_TE


Through = Callable[[torch.Tensor, torch.Tensor, Sequence[CosSin], AttentionInputs, Taps], None]
"""Takes what a layer adds and the stream it adds it to, each [T, E], from before the first layer to behind the last, in
context, with the rotation of each layer, and what to keep on the way. The attention has begun the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """One step. `token_ids_T` int64; `logit_rows` int64, indices into T, in the order the logits are wanted;
    `prompt_lens` for each row of `attention` the length of its sequence's whole prompt, however much of it this
    step computes (some rope scalings depend on it: `workers.models.rope_kinds`). With `pooled_rows`, int64 indices
    into T, the decoder puts the output of its last norm there, [P, E], into `hidden`. `adapters` has the tokens of rows
    that have one; the others' bits do not depend on it. `taps` keeps what enters the layers.
    """

    token_ids_T: torch.Tensor
    attention: AttentionInputs
    logit_rows: torch.Tensor
    prompt_lens: tuple[int, ...]
    pooled_rows: torch.Tensor | None = None
    hidden: list[torch.Tensor] = field(default_factory=list)
    adapters: tuple[AdapterTokens, ...] = ()
    taps: Taps = field(default_factory=Taps)


class Decoder:
    """A model's weights on this rank. Holds no cache and no state between steps: both are the backend's.

    Made by `workers.models.loader.load_model`; the constructor leaves the weights unset.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, *, stored_as: str = "") -> None:
        check_parallel(config, context.parallel.size, expert_parallel=context.expert_parallel)
        self.config = config
        self.context = context
        self.stored_as = stored_as  # the encoding of the weights and their bits, for display
        self.generation = 0  # of the weights' addresses
        self.step_adapters = StepAdapters()
        self._embedding = embedding_of(context, config)
        self._rotations = rotations_of(config, context.device)
        self.growth = StepGrowth(config.scales.growth) if config.scales.growth else None
        self._layers = [DecoderLayer(context, config, layer, self.growth) for layer in range(config.num_layers)]
        self._norm = last_norm_of(context, config)
        self._head = head_of(context, config, self._embedding if config.tied_embeddings else None)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, attention: AttentionBackend, through: Through | None = None) -> torch.Tensor:
        """Writes the step's keys and values into the cache of `attention`, which has begun the step. Returns logits [R,
        V], float32, on every rank.

        In steps without adapters `through` replaces the layers by faster code with the same result, without the overlap
        of long steps' sums over ranks. With tensor parallelism every rank must be given the same inputs. Raises
        WorkerLost when a rank is gone."""
        if self.growth is not None:
            self.growth.begin(inputs.attention)
        rotations = self._rotations(inputs.attention, inputs.prompt_lens)
        stream_TE = self._embedding(inputs.token_ids_T)
        delta_TE = torch.zeros_like(stream_TE)
        self.step_adapters.tokens = inputs.adapters
        overlaps = sums_overlap(self.context.parallel, len(stream_TE))
        if through is not None and not inputs.adapters and not overlaps:
            through(delta_TE, stream_TE, rotations, inputs.attention, inputs.taps)
        else:
            for number, (layer, rotation) in enumerate(zip(self._layers, rotations, strict=True)):
                inputs.taps.take(number, delta_TE, stream_TE)
                delta_TE, stream_TE = layer(delta_TE, stream_TE, rotation, attention)
        if (pooled := inputs.pooled_rows) is not None:
            inputs.hidden.append(self._norm.add(delta_TE[pooled], stream_TE[pooled])[0])
        rows = inputs.logit_rows
        if len(self._layers) in inputs.taps.layers:
            normed_TE, _ = self._norm.add(delta_TE, stream_TE)
            inputs.taps.states[len(self._layers)] = normed_TE
            return self._head.logits(normed_TE[rows])
        # `index_select`, as indexing wakes torch's threads for a few rows
        normed_RE, _ = self._norm.add(delta_TE.index_select(0, rows), stream_TE.index_select(0, rows))
        return self._head.logits(normed_RE)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, E], as the first layer reads them; on every rank."""
        return self._embedding(token_ids_T)

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        """[R, V] of outputs of the last norm, float32, on every rank."""
        return self._head.logits(normed_RE)

    def pack(self) -> None:
        """Packs the loaded weights for this machine. `slots` cannot show them afterwards, and graphs captured before
        hold addresses of freed tensors."""
        self.generation += 1
        for layer in self._layers:
            layer.pack()
        self._head.pack()

    def linears(self) -> Iterator[AdaptableLinear]:
        """The linear layers that an adapter may change."""
        for layer in self._layers:
            yield from layer.linears()

    def expert_counts(self) -> list[torch.Tensor]:
        """For each layer with experts, the tokens that chose each one, int64 [experts]. On a GPU they stay 0."""
        return [counts_X for layer in self._layers if (counts_X := layer.expert_counts) is not None]

    @property
    def waits(self) -> bool:
        return any(layer.waits for layer in self._layers)

    def packed_layers(self) -> list[LayerWeights] | None:
        """Weights of every layer, once packed, if compiled code can do all that each of them does."""
        packed = [layer.packed() for layer in self._layers]
        weights = [layer for layer in packed if layer is not None]
        return weights if len(weights) == len(packed) else None

    def layer_form(self) -> LayerForm | None:
        """The settings that all layers share; None if compiled code cannot compute them."""
        config, norm = self.config, self.config.norm
        norms_over_ranks = config.qk_norm == "all" and self.context.parallel.size > 1
        activation, gated = ACTIVATIONS.get(config.activation), config.spec.gated
        if activation is None or (gated and config.activation == "relu2") or norms_over_ranks:
            return None
        wide = CompiledNorm.WIDE if norm.wide and self.context.dtype != torch.float32 else CompiledNorm.ROUNDED
        ropes = list(dict.fromkeys(config.ropes))
        return LayerForm(
            hidden_size=config.hidden_size,
            norm=CompiledNorm.CENTRED if norm.centred else wide,
            eps=norm.eps,
            activation=activation,
            gated=gated,
            attention_scale=config.attention_scale,
            softcap=config.scales.attention_softcap,
            residual=config.scales.residual,
            parallel=config.spec.places.parallel,
            heads_together=config.qk_norm == "all",
            ropes=tuple(ropes.index(rope) for rope in config.ropes),
        )

    def slots(self) -> Iterator[Slot]:
        for part in self.load_parts():
            yield from part.slots()

    def load_parts(self) -> Iterator[LoadPart]:
        """Parts that are packed together; a tied head reads the embedding's tensors."""
        if self.config.tied_embeddings:
            yield LoadPart(slots=self._embedding.slots, pack=self._head.pack)
        else:
            yield LoadPart(slots=self._embedding.slots)
            yield LoadPart(slots=self._head.slots, pack=self._head.pack)
        for layer in self._layers:
            yield from layer.load_parts()
        yield LoadPart(slots=self._norm.slots)


class DecoderLayer:
    """One layer, with norms by `NormPlaces`. The next norm adds each half's output to the stream."""

    def __init__(
        self, context: LayerContext, config: ModelConfig, layer: int, growth: StepGrowth | None = None
    ) -> None:
        family, prefix = config.spec, f"model.layers.{layer}"
        places = family.places

        def norm(name: str | None) -> RMSNorm | LayerNorm | None:
            return norm_of(context, f"{prefix}.{name}", config.hidden_size, config.norm) if name else None

        self._before_attention, self._after_attention = norm(places.before_attention), norm(places.after_attention)
        self._before_mlp, self._after_mlp = norm(places.before_mlp), norm(places.after_mlp)
        self._parallel_halves = places.parallel
        self._scale = config.scales.residual
        attention: type[LatentAttention | SelfAttention] = LatentAttention if config.latent else SelfAttention
        self._attention: AttentionLayer = attention(context, f"{prefix}.self_attn", config, layer)
        if growth is not None:
            assert isinstance(self._attention, SelfAttention), "queries grow in plain attention only"
            self._attention.growth = growth
        self._mlp = feed_forward(context, prefix, config, layer)

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

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from self._attention.linears()
        yield from self._mlp.linears()

    @property
    def waits(self) -> bool:
        return self._mlp.waits

    @property
    def expert_counts(self) -> torch.Tensor | None:
        return self._mlp.counts_X if isinstance(self._mlp, MixtureOfExperts) else None

    def packed(self) -> LayerWeights | None:
        """Returns None if compiled layers cannot compute this layer."""
        qkv, out = self._attention.packed_products()
        feed_forward = self._mlp.packed_products()
        if qkv is None or out is None or feed_forward is None:
            return None
        gate_up, down = feed_forward
        return LayerWeights(
            attention_norm=_norm_tensors(self._before_attention),
            qkv=qkv,
            head_norms=self._attention.head_norms,
            sinks_N=self._attention.sinks_N,
            out=out,
            attention_after=_norm_tensors(self._after_attention),
            mlp_norm=_norm_tensors(self._before_mlp),
            gate_up=gate_up,
            down=down,
            mlp_after=_norm_tensors(self._after_mlp),
            window=self._attention.window,
            latents=self._attention.latents,
        )

    def load_parts(self) -> Iterator[LoadPart]:
        for norm in (self._before_attention, self._after_attention, self._before_mlp, self._after_mlp):
            if norm is not None:
                yield LoadPart(slots=norm.slots)
        yield LoadPart(slots=self._attention.slots, pack=self._attention.pack)
        yield LoadPart(slots=self._mlp.slots, pack=self._mlp.pack)

    def slots(self) -> Iterator[Slot]:
        for part in self.load_parts():
            yield from part.slots()


def _add(
    norm: RMSNorm | LayerNorm | None, delta_TE: torch.Tensor, stream_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm is not None:
        return norm.add(delta_TE, stream_TE)
    stream_TE = delta_TE + stream_TE
    return stream_TE, stream_TE


def _norm_tensors(norm: RMSNorm | LayerNorm | None) -> NormTensors | None:
    if norm is None:
        return None
    return norm.weight, norm.bias if isinstance(norm, LayerNorm) else None


def embedding_of(context: LayerContext, config: ModelConfig) -> Embedding:
    scale = config.scales.embedding
    return Embedding(context, "model.embed_tokens", config.vocab_size, config.hidden_size, scale=scale)


def last_norm_of(context: LayerContext, config: ModelConfig) -> RMSNorm | LayerNorm:
    return norm_of(context, "model.norm", config.hidden_size, config.norm)


def head_of(context: LayerContext, config: ModelConfig, tied: Embedding | None) -> Head:
    """`tied`: the embedding, for a model without a head of its own."""
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
