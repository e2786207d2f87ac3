"""A checkpoint's config.json and generation_config.json as one value. Read strictly, before any weight. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from protos.errors import BadCheckpoint, Misconfigured
from protos.model_files.ends import end_ids
from protos.model_files.fields import Fields
from protos.model_files.files_seam import ModelFiles
from protos.model_files.opening import open_model
from protos.values import ITEM_BYTES, KVLayout
from workers.models.families.experts_config import ExpertsConfig
from workers.models.families.family import Family
from workers.models.families.latent_config import LatentConfig
from workers.models.families.layer_ropes import Ropes, RopeSizes
from workers.models.families.layer_windows import Windows
from workers.models.families.registry import BY_NAME, family_of, is_ours
from workers.models.families.traits import Activation, NormKind, QKNorm, Scales, read_activation
from workers.models.interface import ServedConfig
from workers.models.rope_kinds import DynamicRope, LinearRope, Rope, YarnRope, rope_fields
from workers.weights.registry import read_format, stored_tensors
from workers.weights.source import FLOATS, StoredTensor
from workers.weights.weight_formats import EMBEDDING, HEAD, Quantize, RoundedLayers, WeightFormat, rounded_format

# Fields that would change what the layers compute. Present with another value than these, the model is refused, unless
# its family reads the field.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "n_routed_experts": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "per_layer_config": ({},),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
}

_MIXTRAL_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_MAX_LAYERS, _MAX_HEAD = 4096, 65536  # larger numbers are damage, and would not end


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and parts of a decoder. `windows` and `ropes` have one entry a layer. `dtype` is the one the weights were
    saved in. The first `rotary_dim` dimensions of a head turn.

    `max_position` is config.json's `max_position_embeddings`; `max_model_len` is how far the rope scaling carries.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: NormKind
    ropes: Ropes
    windows: Windows
    activation: Activation
    scales: Scales
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm | None
    tied_embeddings: bool
    max_position: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    weight_format: WeightFormat | None  # None: in floating point
    experts: ExpertsConfig | None = None  # None: every layer has one gated MLP
    latent: LatentConfig | None = None  # None: keys and values are cached; else `head_dim` is a head's rotated part
    num_mtp_layers: int = 0  # stored behind the decoder's layers for multi-token prediction, and not loaded

    @property
    def spec(self) -> Family:
        return BY_NAME[self.family]

    @property
    def norm_eps(self) -> float:
        return self.norm.eps

    @property
    def rope(self) -> Rope:
        """The rope of the layers that rotate; of several ropes, that of layers without a window."""
        full = [rope for rope, window in zip(self.ropes, self.windows, strict=True) if rope and window is None]
        return (full or [rope for rope in self.ropes if rope])[0]

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.scales.attention is None else self.scales.attention

    @property
    def num_linear_weights(self) -> int:
        """Weights of all linear layers, with the head's if it has its own."""
        heads = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if self.latent is not None:
            heads = self.latent.layer_weights(self.hidden_size, self.num_heads)
        dense, head = (
            self.spec.mlp_projections * self.hidden_size * self.intermediate_size,
            self.vocab_size * self.hidden_size,
        )
        num_sparse = self.experts.num_sparse_layers if self.experts else 0
        sparse = self.experts.layer_weights(self.hidden_size) if self.experts else 0
        layers = self.num_layers * heads + (self.num_layers - num_sparse) * dense + num_sparse * sparse
        return layers + (0 if self.tied_embeddings else head)

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        layers = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        return tuple(f"model.layers.{layer}." for layer in layers)

    def kv_layout(self, *, block_size: int, dtype: str, tp: int = 1) -> KVLayout:
        if self.latent is not None:
            return KVLayout.latent(
                num_layers=self.num_layers, width=self.latent.width, block_size=block_size, dtype=dtype, tp=tp
            )
        return KVLayout.dense(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            tp=tp,
        )

    def prefix_key(self, num_prompt_tokens: int) -> bytes:
        """Mix this into the hash of a prompt's KV blocks: b"" unless the prompt's length changes their contents.

        Only dynamic and longrope rope scaling do that, and only beyond the length the model was trained with.
        """
        regimes = {rope.regime(num_prompt_tokens) for rope in self.ropes if rope} - {0}
        return b"".join(regime.to_bytes(8, "little") for regime in sorted(regimes))


def read_config(path: str | Path, quantize: Quantize = "off") -> ModelConfig:
    """Reads the model at `path`, a folder or a GGUF file, weights left alone; `quantize` is how they will be rounded.

    Raises BadCheckpoint (a file missing, truncated or contradictory) or UnsupportedModel (an architecture or option
    that is not served), each naming the file, the field and the fix.
    """
    files = open_model(path)
    return config_of(Fields.of_file(files, "config.json"), files, quantize)


def config_of(config: Fields, files: ModelFiles, quantize: Quantize = "off") -> ModelConfig:
    """The config with these fields, which stand for config.json. Raises as `read_config`."""
    family = family_of(config)
    config = config.over(family.defaults)
    _refuse_unknown_parts(config, family)
    sizes = _Sizes.of(config, family)
    latent = family.latent(config) if family.latent else None
    if latent is not None:
        sizes = replace(sizes, num_kv_heads=1, head_dim=latent.rope_dim)
    windows = family.windows(config, sizes.num_layers)
    rotary_dim = _rotary_dim(config, family, sizes.head_dim)
    turned = RopeSizes(
        rotary_dim=rotary_dim, max_position=sizes.max_position, partial="partial_rotary_factor" in family.reads
    )
    ropes = family.ropes(config, windows, turned)
    has_bias = config.flag(family.attention_bias_field)
    stored = read_format(config, files)
    return ModelConfig(
        family=family.name,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rotary_dim=rotary_dim,
        norm=_norm(config, family),
        ropes=ropes,
        windows=windows,
        activation=read_activation(config, family.activation_field),
        scales=family.scales(config),
        qkv_bias=family.qkv_bias or has_bias,
        o_bias=family.o_bias and has_bias,
        mlp_bias=config.flag(family.mlp_bias_field),
        qk_norm=family.qk_norm if family.qk_norm_field is None or config.flag(family.qk_norm_field) else None,
        tied_embeddings=config.flag("tie_word_embeddings"),
        max_position=sizes.max_position,
        max_model_len=_max_model_len(ropes, sizes.max_position),
        dtype=config.text_or("dtype", config.text_or("torch_dtype", "float32")),
        eos_token_ids=end_ids(files, config, sizes.vocab_size),
        weight_format=stored if quantize == "off" else rounded_format(quantize, stored),
        experts=family.experts(config, sizes.num_layers) if family.experts else None,
        latent=latent,
        num_mtp_layers=config.integer_or("num_nextn_predict_layers", 0, minimum=0),
    )


def check_parallel(config: ModelConfig, tp: int, setting: str = "tp", *, expert_parallel: bool = False) -> None:
    """Raises Misconfigured when `tp` ranks cannot share the model's heads, MLP or experts, with what would do."""
    if _shares(config, tp, expert_parallel):
        return
    heads, kv_heads = config.num_heads, config.num_kv_heads
    widths = " and ".join(f"{name} {width}" for name, width in _widths(config, expert_parallel).items())
    possible = ", ".join(str(number) for number in range(1, heads + 1) if _shares(config, number, expert_parallel))
    whole, apart = "", ""
    if config.experts is not None and expert_parallel:
        whole = f", be at most the number of experts {config.experts.num_experts}"
    elif config.experts is not None and config.experts.width % tp and _shares(config, tp, True):
        apart = ", or set worker.expert_parallel, which puts whole experts on ranks"
    raise Misconfigured(
        f"{setting} is {tp}: it must divide the model's {heads} heads{widths and f' and its {widths}'}{whole}, and "
        f"divide its {kv_heads} key/value heads or be a multiple of them: give one of {possible}{apart}",
        param=setting,
    )


def longest_sequence(config: ServedConfig, limit: int | None) -> int:
    """Tokens of a prompt and its answer: `worker.max_model_len`, or the model's own length. Raises Misconfigured."""
    if limit is not None and limit > config.max_model_len:
        raise Misconfigured(
            f"worker.max_model_len is {limit}: this model was made for {config.max_model_len} at most: give that, "
            "or a rope_scaling in its config.json",
            param="max_model_len",
        )
    return limit or config.max_model_len


def weight_bytes(path: str | Path, dtype: str, quantize: Quantize = "off") -> int:
    """Bytes of the checkpoint's weights in memory: packed tensors as they are stored, linear weights that are rounded
    as they are loaded as integers with their scales, others converted to `dtype`; none for multi-token prediction."""
    is_known = is_ours(Fields.of_file(open_model(path), "config.json"))
    left_out = read_config(path, quantize).mtp_prefixes if is_known else ()
    tensors = {name: tensor for name, tensor in stored_tensors(Path(path)).items() if not name.startswith(left_out)}
    if quantize == "off":
        return sum(_loaded_bytes(name, stored, dtype) for name, stored in tensors.items())
    rounding, total = RoundedLayers(levels=quantize), 0
    for name, stored in tensors.items():
        linear = name.endswith(("_proj.weight", ".c_fc.weight", "_with_mqa.weight")) or _MIXTRAL_EXPERT.search(name)
        if name == f"{HEAD}.weight" or linear:
            total += rounding.num_bytes(name.removesuffix(".weight"), *stored.shape)
        else:
            total += _loaded_bytes(name, stored, dtype)
    embedding = tensors.get(f"{EMBEDDING}.weight")
    if f"{HEAD}.weight" not in tensors and embedding is not None:
        total += rounding.num_bytes(HEAD, *embedding.shape)
    return total


def mtp_bytes(path: str | Path, model: ModelConfig, dtype: str) -> int:
    prefix = f"model.layers.{model.num_layers}."
    return sum(
        [
            _loaded_bytes(name, tensor, dtype)
            for name, tensor in stored_tensors(Path(path)).items()
            if name.startswith(prefix)
        ]
    )


def _loaded_bytes(name: str, stored: StoredTensor, dtype: str) -> int:
    if stored.dtype not in FLOATS or not name.endswith((".weight", ".bias")):
        return stored.num_bytes
    return prod(stored.shape) * ITEM_BYTES.get(dtype, 2)


def splits_heads(num_heads: int, num_kv_heads: int, tp: int) -> bool:
    """True if this many ranks can share the heads evenly, each with whole key/value heads, or with one that others have
    too."""
    return not num_heads % tp and (not num_kv_heads % tp or not tp % num_kv_heads)


def _shares(config: ModelConfig, tp: int, expert_parallel: bool) -> bool:
    if expert_parallel and config.experts is not None and tp > config.experts.num_experts:
        return False
    heads = splits_heads(config.num_heads, config.num_kv_heads, tp)
    return heads and not any(width % tp for width in _widths(config, expert_parallel).values())


def _widths(config: ModelConfig, expert_parallel: bool) -> dict[str, int]:
    experts, sizes = config.experts, {}
    if experts is None or not all(experts.sparse):
        sizes["MLP size"] = config.intermediate_size
    if experts is not None and not expert_parallel:
        sizes["expert size"] = experts.width
    if experts is not None and experts.shared_width:
        sizes["shared expert's size"] = experts.shared_width
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int

    @classmethod
    def of(cls, config: Fields, family: Family) -> _Sizes:
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        # Only the first Llamas leave this out: they knew no grouped queries.
        num_kv_heads = config.integer_or("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise BadCheckpoint(f"{config.where}: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly")
        if family.head_dim is None and "head_dim" not in config and hidden_size % num_heads:
            raise BadCheckpoint(
                f"{config.where}: {num_heads} heads cannot share hidden_size {hidden_size}, give head_dim"
            )
        default = min(family.head_dim or hidden_size // num_heads, _MAX_HEAD)
        head_dim = config.integer_or("head_dim", default, maximum=_MAX_HEAD)
        if head_dim % 2:
            raise config.unserved("head_dim", "an even number is, since rope turns pairs", head_dim)
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers", maximum=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=config.integer("max_position_embeddings"),
        )


def _refuse_unknown_parts(config: Fields, family: Family) -> None:
    rope, growth = rope_fields(config), "llama_4_scaling_beta"
    if growth not in family.reads and rope.raw(growth):
        raise rope.unserved(growth, f"{family.name} has none")
    for key, harmless in _NEUTRAL.items():
        if key not in family.reads and key in config and config.raw(key) not in harmless:
            raise config.unserved(key, f"{family.name} has none")


def _norm(config: Fields, family: Family) -> NormKind:
    return replace(family.norm, eps=config.number_or(family.norm_eps_field, family.norm.eps))


def _rotary_dim(config: Fields, family: Family, head_dim: int) -> int:
    """Rotated dimensions of a head: a `partial_rotary_factor` of it where the family has one. Raises BadCheckpoint."""
    key = "partial_rotary_factor"
    if key not in family.reads:
        return head_dim
    factor = rope_fields(config).number_or(key, config.number_or(key, 1.0))
    if family.rotary_dim_field is not None and family.rotary_dim_field in config:
        key = family.rotary_dim_field
        factor = config.integer(key) / head_dim
    turned = int(head_dim * factor)
    if turned % 2 or not 2 <= turned <= head_dim:
        raise config.wrong(key, f"an even number of 2 to {head_dim} dimensions that turn, it makes {turned}")
    return turned


def _max_model_len(ropes: Ropes, max_position: int) -> int:
    distinct = {rope for rope in ropes if rope}
    if len(distinct) != 1:
        return max_position
    match distinct.pop():
        case LinearRope() | DynamicRope() as rope:
            return int(max_position * rope.factor)
        case YarnRope() as rope:
            return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
