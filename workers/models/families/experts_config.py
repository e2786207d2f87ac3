"""A mixture of experts as config.json describes it: one value, and a reader for each family's fields. Pure.

    router logits [num_experts] ── scores ── choice of num_chosen ── weights ──▶ sum of the chosen experts' outputs

`workers.models.layers.routing` computes the choice. Rules are those of transformers 5.23's modeling files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypedDict, cast

from protos.model_files.fields import Fields

Scoring = Literal["softmax", "sigmoid", "softmax-of-chosen"]
GroupScore = Literal["max", "top-2"]

_MAX_EXPERTS, _MAX_WIDTH = 4096, 1 << 20  # more is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """How a token's experts follow from its router logits. Equal scores go to the expert with the lower id.

    `scoring`: "softmax" or "sigmoid" of all logits, or the choice is by logits and the weights are a softmax over the
    chosen. Groups are runs of experts of equal size: experts are chosen from the `num_chosen_groups` with the highest
    scores, which are the maximum of their experts' scores or the sum of the two highest.
    """

    num_experts: int
    num_chosen: int
    scoring: Scoring
    renormalised: bool = False  # weights are divided by their sum plus `epsilon`
    epsilon: float = 0.0
    factor: float = 1.0  # of every weight, last
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: GroupScore = "max"
    biased: bool = False  # the router adds a bias to its logits
    corrected: bool = False  # a stored correction is added to the scores for the choice, not for the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How a family names the tensors of a layer's experts, below `model.layers.N`."""

    module: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


_MIXTRAL_NAMES = ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within `limit` of 0 (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model's sparse layers; `sparse` has one entry a layer. All sparse layers are alike."""

    routing: ExpertRouting
    width: int  # of each expert
    sparse: tuple[bool, ...]
    names: ExpertNames
    shared_width: int = 0  # of the shared expert; 0: none
    shared_gated: bool = False  # its output is times sigmoid of a learned product of the token
    clamped: ClampedGate | None = None  # None: silu(gate) * up
    biased: bool = False  # gate, up and down of each expert

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.sparse)

    def layer_weights(self, hidden_size: int) -> int:
        """Weights of a sparse layer's matrices: router, experts, shared expert and its gate."""
        widths = self.num_experts * self.width + self.shared_width
        return hidden_size * (self.num_experts + 3 * widths + self.shared_gated)


def mixtral_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    numbers = _numbers(config, "num_local_experts", 8, 2)
    routing = ExpertRouting(**numbers, scoring="softmax", renormalised=True)
    return _in_every_layer(config, num_layers, routing, _MIXTRAL_NAMES)


def qwen2_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    _require(config, "qkv_bias", config.flag("qkv_bias", default=True), (True,))
    return _qwen_experts(config, num_layers, num_experts=60, num_chosen=4, shared=True)


def qwen3_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    return _qwen_experts(config, num_layers, num_experts=128, num_chosen=8, shared=False)


def deepseek_v2_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    """The softmax is never renormalised, as transformers computes it."""
    numbers = _numbers(config, "n_routed_experts", 64, None)
    method = config.text_or("topk_method", "greedy")
    _require(config, "topk_method", method, ("greedy", "group_limited_greedy"))
    _require(config, "scoring_func", config.text_or("scoring_func", "softmax"), ("softmax",))
    _require(config, "norm_topk_prob", config.flag("norm_topk_prob"), (False,))
    factor = config.number_or("routed_scaling_factor", 1.0)
    routing = ExpertRouting(**numbers, scoring="softmax", factor=factor)
    if method == "group_limited_greedy":
        routing = _grouped(config, routing, smallest=1)
    return _with_shared(config, num_layers, routing, first_sparse=0, num_shared=2)


def deepseek_v3_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    return _sigmoid_experts(config, num_layers, num_experts=256, groups=(8, 4), factor=2.5, first_sparse=3)


def glm4_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    return _sigmoid_experts(config, num_layers, num_experts=128, groups=(1, 1), factor=1.0, first_sparse=1)


def minimax_m2_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    """Published files have options that transformers does not read: others than theirs are refused."""
    numbers = _numbers(config, "num_local_experts", 256, 8)
    _require(config, "scoring_func", config.text_or("scoring_func", "sigmoid"), ("sigmoid",))
    _require(config, "qk_norm_type", config.text_or("qk_norm_type", "per_layer"), ("per_layer",))
    for key in ("use_qk_norm", "use_routing_bias"):
        _require(config, key, config.flag(key, default=True), (True,))
    _require(config, "shared_intermediate_size", config.integer_or("shared_intermediate_size", 0, minimum=0), (0,))
    routing = ExpertRouting(**numbers, scoring="sigmoid", renormalised=True, corrected=True)
    return _in_every_layer(config, num_layers, routing, replace(_MIXTRAL_NAMES, correction="e_score_correction_bias"))


def gpt_oss_experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    numbers = _numbers(config, "num_local_experts", 128, 4)
    routing = ExpertRouting(**numbers, scoring="softmax-of-chosen", biased=True)
    gate = ClampedGate(alpha=config.number_or("swiglu_alpha", 1.702), limit=config.number_or("swiglu_limit", 7.0))
    experts = _in_every_layer(config, num_layers, routing, ExpertNames(router="router"))
    return replace(experts, clamped=gate, biased=True)


def _qwen_experts(
    config: Fields, num_layers: int, *, num_experts: int, num_chosen: int, shared: bool
) -> ExpertsConfig | None:
    """Reads which layers are sparse: those whose number, from 1, is a multiple of `decoder_sparse_step` and is not
    listed."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if config.raw(key) == 0:
        return None
    numbers = _numbers(config, key, num_experts, num_chosen)
    step, dense = config.integer_or("decoder_sparse_step", 1), _layers(config, "mlp_only_layers", num_layers)
    return ExpertsConfig(
        routing=ExpertRouting(**numbers, scoring="softmax", renormalised=config.flag("norm_topk_prob")),
        width=config.integer("moe_intermediate_size", maximum=_MAX_WIDTH),
        sparse=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
        names=ExpertNames(shared="shared_expert"),
        shared_width=config.integer("shared_expert_intermediate_size", maximum=_MAX_WIDTH) if shared else 0,
        shared_gated=shared,
    )


def _sigmoid_experts(
    config: Fields, num_layers: int, *, num_experts: int, groups: tuple[int, int], factor: float, first_sparse: int
) -> ExpertsConfig:
    """The router of DeepSeek-V3 and GLM-4-MoE. `groups`: defaults of `n_group` and `topk_group`."""
    numbers = _numbers(config, "n_routed_experts", num_experts, 8)
    _require(config, "scoring_func", config.text_or("scoring_func", "sigmoid"), ("sigmoid",))
    _require(config, "topk_method", config.text_or("topk_method", "noaux_tc"), ("noaux_tc",))
    routing = ExpertRouting(
        **numbers,
        scoring="sigmoid",
        renormalised=config.flag("norm_topk_prob", default=True),
        epsilon=1e-20,
        factor=config.number_or("routed_scaling_factor", factor),
        group_score="top-2",
        corrected=True,
    )
    routing = _grouped(config, routing, smallest=2, defaults=groups)
    return _with_shared(config, num_layers, routing, first_sparse=first_sparse, num_shared=1)


def _in_every_layer(config: Fields, num_layers: int, routing: ExpertRouting, names: ExpertNames) -> ExpertsConfig:
    width = config.integer("intermediate_size", maximum=_MAX_WIDTH)
    return ExpertsConfig(routing=routing, width=width, sparse=(True,) * num_layers, names=names)


def _with_shared(
    config: Fields, num_layers: int, routing: ExpertRouting, *, first_sparse: int, num_shared: int
) -> ExpertsConfig:
    _require(config, "moe_layer_freq", config.integer_or("moe_layer_freq", 1), (1,))
    first = config.integer_or("first_k_dense_replace", first_sparse, minimum=0)
    width = config.integer("moe_intermediate_size", maximum=_MAX_WIDTH)
    most = _MAX_WIDTH // width
    count = config.integer_or("n_shared_experts", min(num_shared, most), minimum=0, maximum=most)
    return ExpertsConfig(
        routing=routing,
        width=width,
        sparse=tuple(layer >= first for layer in range(num_layers)),
        names=ExpertNames(),
        shared_width=count * width,
    )


class _Numbers(TypedDict):
    num_experts: int
    num_chosen: int


def _numbers(config: Fields, key: str, default: int, chosen: int | None) -> _Numbers:
    """`default` experts if `key` is absent (None: the file must have it); a token chooses `chosen` of them."""
    _require(config, "hidden_act", config.text_or("hidden_act", "silu"), ("silu", "swish"))
    num_experts = config.integer_or(key, default, maximum=_MAX_EXPERTS)
    key = "num_experts_per_tok"
    num_chosen = config.integer(key) if chosen is None else config.integer_or(key, chosen)
    if num_chosen > num_experts:
        raise config.wrong(key, f"at most the number of experts, {num_experts}", num_chosen)
    return _Numbers(num_experts=num_experts, num_chosen=num_chosen)


def _grouped(
    config: Fields, routing: ExpertRouting, *, smallest: int, defaults: tuple[int, int] | None = None
) -> ExpertRouting:
    """Reads `n_group` and `topk_group`; a group has at least `smallest` experts."""
    num_experts, num_chosen = routing.num_experts, routing.num_chosen
    if defaults is None:
        num_groups, num_chosen_groups = config.integer("n_group"), config.integer("topk_group")
    else:
        num_groups = config.integer_or("n_group", defaults[0])
        num_chosen_groups = config.integer_or("topk_group", defaults[1])
    size = num_experts // num_groups
    if num_experts % num_groups or size < smallest:
        raise config.wrong(
            "n_group", f"a divisor of {num_experts} experts, with at least {smallest} in a group", num_groups
        )
    if not -(-num_chosen // size) <= num_chosen_groups <= num_groups:
        raise config.wrong("topk_group", f"1 to {num_groups} (n_group), with {num_chosen} experts in as many groups")
    return replace(routing, num_groups=num_groups, num_chosen_groups=num_chosen_groups)


def _layers(config: Fields, key: str, num_layers: int) -> frozenset[int]:
    """A list of layers' indices; empty when absent."""
    listed = config.raw(key) or []
    if isinstance(listed, list) and all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        return frozenset(cast(list[int], listed))
    raise config.wrong(key, f"a list of layers from 0 to {num_layers - 1}")


def _require(config: Fields, key: str, value: object, served: tuple[object, ...]) -> None:
    if value not in served:
        raise config.unserved(key, f"it must be {' or '.join(map(repr, served))}", value)
