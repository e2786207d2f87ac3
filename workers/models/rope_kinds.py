"""Rotary position embeddings as config.json describes them: one value per kind of scaling, read strictly. Pure.

Two kinds, dynamic and longrope, depend on a length. transformers takes the longest position of each forward pass,
so there the outcome depends on how a prompt is cut into chunks. Here the token at position p of a sequence with a
prompt of P tokens is rotated for a length of max(P, p + 1): exactly what transformers' `generate` does when it is
given the prompt in one piece, and independent of chunks, batches and recomputation. Keys in the cache keep their
rotation. Sequences share cached keys only if their prompts have the same `regime`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Unscaled. `theta` is the base of the geometric series of wavelengths; cos and sin are times `magnitude`."""

    theta: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def regime(self, length: int) -> int:
        """Lengths of the same regime have the same frequencies. 0: those that the model starts with."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(Rope):
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalRope(Rope):
    """Only the first `proportion` of each head's pairs turn."""

    factor: float
    proportion: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope(Rope):
    """NTK-aware: beyond `max_position` the base grows with the length."""

    factor: float
    max_position: int

    def regime(self, length: int) -> int:
        return length if length > self.max_position else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(Rope):
    """https://arxiv.org/abs/2309.00071"""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    @property
    def magnitude(self) -> float:
        return self.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Rope):
    """https://arxiv.org/abs/2402.13753: one list of factors up to `original_max_position`, another beyond."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def regime(self, length: int) -> int:
        return self.original_max_position + 1 if length > self.original_max_position else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorsRope(Rope):
    """Each pair's frequency is divided by a factor that the checkpoint stores (GGUF's rope_freqs)."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(Rope):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def rope_fields(config: Fields) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before) of a config.json."""
    return config.inner("rope_scaling" if config.raw("rope_scaling") else "rope_parameters")


def read_rope(config: Fields, *, head_dim: int, max_position: int, partial: bool = False) -> Rope:
    """The rope of a config.json; its theta may stand beside the scaling. `head_dim` counts the dimensions that turn:
    with `partial` the caller has taken partial_rotary_factor into account.

    Raises UnsupportedModel for a kind that is not known, BadCheckpoint for parameters that do not fit the kind.
    """
    scaling = rope_fields(config)
    for layer_type in ("full_attention", "sliding_attention"):
        if layer_type in scaling:
            raise UnsupportedModel(f"{scaling.where}: another rope for {layer_type!r} layers is not supported")
    theta = scaling.number_or("rope_theta", config.number_or("rope_theta", 10_000.0))
    kind = scaling.text_or("rope_type", scaling.text_or("type", "default"))
    proportion = scaling.number_or("partial_rotary_factor", config.number_or("partial_rotary_factor", 1.0))
    if kind not in _READERS:
        raise scaling.unserved("rope_type", f"known are {', '.join(_READERS)}", kind)
    if proportion != 1.0 and kind != "proportional" and not partial:
        raise scaling.unserved("partial_rotary_factor", "only 1 (all pairs turn) is", proportion)
    # The pre-training length may also be beside the parameters, which wins in transformers.
    key = "original_max_position_embeddings"
    original = config.integer_or(key, scaling.integer_or(key, max_position))
    facts = _Facts(
        theta=theta, max_position=max_position, original=original, num_pairs=head_dim // 2, proportion=proportion
    )
    return _READERS[kind](scaling, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Fields of config.json outside the scaling's own parameters."""

    theta: float
    max_position: int
    original: int
    num_pairs: int
    proportion: float


def _yarn(scaling: Fields, facts: _Facts) -> Rope:
    factor = scaling.number_or("factor", facts.max_position / facts.original)
    mscale = scaling.number_or("mscale", 0.0, above=-math.inf)
    mscale_all_dim = scaling.number_or("mscale_all_dim", 0.0, above=-math.inf)
    if mscale and mscale_all_dim:
        magnitude = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    else:
        magnitude = _yarn_magnitude(factor, 1.0)
    return YarnRope(
        theta=facts.theta,
        factor=factor,
        original_max_position=facts.original,
        attention_factor=scaling.number_or("attention_factor", magnitude),
        beta_fast=scaling.number_or("beta_fast", 32.0),
        beta_slow=scaling.number_or("beta_slow", 1.0),
        truncate=scaling.flag("truncate", default=True),
    )


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(scaling: Fields, facts: _Facts) -> Rope:
    factor = scaling.number_or("factor", facts.max_position / facts.original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(facts.original))
    return LongRope(
        theta=facts.theta,
        short_factors=scaling.numbers("short_factor", facts.num_pairs),
        long_factors=scaling.numbers("long_factor", facts.num_pairs),
        original_max_position=facts.original,
        attention_factor=scaling.number_or("attention_factor", magnitude),
    )


def _llama3(scaling: Fields, facts: _Facts) -> Rope:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise BadCheckpoint(f"{scaling.where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return Llama3Rope(
        theta=facts.theta,
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=facts.original,
    )


_READERS: dict[str, Callable[[Fields, _Facts], Rope]] = {
    "default": lambda _, to: Rope(theta=to.theta),
    "linear": lambda by, to: LinearRope(theta=to.theta, factor=by.number("factor")),
    "dynamic": lambda by, to: DynamicRope(theta=to.theta, factor=by.number("factor"), max_position=to.max_position),
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": lambda by, to: FactorsRope(theta=to.theta, factors=by.numbers("factors", to.num_pairs)),
    "llama3": _llama3,
    "proportional": lambda by, to: ProportionalRope(
        theta=to.theta, factor=by.number_or("factor", 1.0), proportion=to.proportion
    ),
}
