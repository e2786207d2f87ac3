"""What the engine needs of a model: Baton's own (`config`, `decoder`), or transformers' (`transformers`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from protos.values import KVLayout
from workers.models.families.windows import Windows

if TYPE_CHECKING:
    import torch

    from workers.adapters.linear import AdaptableLinear
    from workers.adapters.low_rank import StepAdapters
    from workers.attention.base import AttentionBackend
    from workers.checkpoint.encoding import LayerContext
    from workers.models.decoder import ModelInputs, Through


class ServedConfig(Protocol):
    """What the engine needs to know of a model, as `ModelConfig` has it."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def windows(self) -> Windows: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def kv_layout(self, *, block_size: int, dtype: str, tp: int = 1) -> KVLayout: ...
    def prefix_key(self, num_prompt_tokens: int) -> bytes: ...


class ServedDecoder(Protocol):
    """A model's weights on this rank, as `Decoder` has them."""

    @property
    def config(self) -> ServedConfig: ...
    @property
    def context(self) -> LayerContext: ...
    @property
    def stored_as(self) -> str: ...
    def forward(
        self, inputs: ModelInputs, attention: AttentionBackend, through: Through | None = None
    ) -> torch.Tensor: ...
    @property
    def step_adapters(self) -> StepAdapters: ...
    def linears(self) -> Iterable[AdaptableLinear]: ...
    def pack(self) -> None: ...
    def expert_counts(self) -> list[torch.Tensor]: ...
