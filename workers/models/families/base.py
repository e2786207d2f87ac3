"""What a model family is: which fields of config.json it reads, and the layers that it makes of them. Pure: the layers
are named, and loaded only when a decoder is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from protos.model_files.fields import Fields
from workers.models.families.windows import Windows, no_windows

if TYPE_CHECKING:
    from workers.checkpoint.encoding import LayerContext
    from workers.models.config import ModelConfig
    from workers.models.layers.base import AttentionLayer, FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`attention_factory` and `mlp_factory` name the functions that make a layer's halves. Their arguments are the
    context, the prefix of the tensors' names, the model's config and the layer's index."""

    name: str  # config.json's model_type
    architecture: str
    models: str  # for users: what is published under this architecture
    windows: Callable[[Fields, int], Windows] = no_windows
    reads: frozenset[str] = frozenset()  # fields that only some families may set, such as attention_bias
    qkv_bias: bool = False  # always, without a field of config.json
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden size / heads, unless config.json has another
    attention_factory: str = "workers.models.layers.attention:SelfAttention"
    mlp_factory: str = "workers.models.layers.mlp:GatedMLP"

    def attention(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> AttentionLayer:
        made: AttentionLayer = resolve_name(self.attention_factory)(context, prefix, config, layer)
        return made

    def mlp(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> FeedForward:
        made: FeedForward = resolve_name(self.mlp_factory)(context, prefix, config, layer)
        return made
