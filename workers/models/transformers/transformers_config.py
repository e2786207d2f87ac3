"""The sizes of a decoder that transformers computes. Pure: `tracing` determines them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from protos.errors import Misconfigured
from protos.values import KVLayout
from workers.models.families.layer_windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function in a forward pass: a layer of the KV cache. Sizes are the whole model's."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """A decoder by transformers. `calls` has one entry a layer of the cache, in the order in which the model computes
    them; heads and head size of the cache are the largest of them.

    `tp_unit` is what the number of ranks must divide; where transformers has no plan for several, it is 1, and
    `why_one_rank` gives the reason.
    """

    family: str  # model_type
    architecture: str
    version: str  # of transformers
    vocab_size: int
    calls: tuple[AttentionCall, ...]
    qkv_bias: bool
    max_position: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    tp_unit: int
    why_one_rank: str
    long_from: int | None = None  # longer prompts have other rope frequencies, and so other keys

    @property
    def num_layers(self) -> int:
        return len(self.calls)

    @property
    def num_heads(self) -> int:
        return max(call.num_heads for call in self.calls)

    @property
    def num_kv_heads(self) -> int:
        return max(call.num_kv_heads for call in self.calls)

    @property
    def head_dim(self) -> int:
        """The cache's head size: even, since its kernels turn pairs."""
        widest = max(max(call.key_dim, call.value_dim) for call in self.calls)
        return widest + widest % 2

    @property
    def windows(self) -> Windows:
        return tuple(call.window for call in self.calls)

    @property
    def max_model_len(self) -> int:
        return self.max_position

    def kv_layout(self, *, block_size: int, dtype: str, tp: int = 1) -> KVLayout:
        return KVLayout.dense(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            tp=tp,
        )

    def prefix_key(self, num_prompt_tokens: int) -> bytes:
        if self.long_from is None or num_prompt_tokens <= self.long_from:
            return b""
        return (self.long_from + 1).to_bytes(8, "little")

    def check_parallel(self, tp: int, setting: str, *, expert_parallel: bool) -> None:
        """Raises Misconfigured for a number of ranks that cannot share the model."""
        if expert_parallel:
            raise Misconfigured(
                f"expert_parallel: transformers computes {self.architecture}: leave it out", param="expert_parallel"
            )
        if self.tp_unit % tp == 0:
            return
        possible = ", ".join(str(size) for size in range(1, self.tp_unit + 1) if self.tp_unit % size == 0)
        why = self.why_one_rank or (
            f"it must divide {self.tp_unit}, as it divides the heads, the key/value heads and each size that "
            f"transformers' plan for {self.architecture} cuts"
        )
        raise Misconfigured(f"{setting} is {tp}: {why}: give {possible}", param=setting)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> TransformersConfig:
        calls = tuple(AttentionCall(**call) for call in data["calls"])
        return cls(**{**data, "calls": calls, "eos_token_ids": tuple(data["eos_token_ids"])})
