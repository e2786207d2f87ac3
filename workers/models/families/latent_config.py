"""Latent attention (MLA) as config.json describes it. Pure.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434, 2.1). Of each token the cache keeps one vector for all heads: `rank`
numbers, of which keys and values are linear functions, and a key of `rope_dim` numbers that turns with its position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protos.model_files.fields import Fields
from workers.models.families.traits import Scales
from workers.models.rope_kinds import rope_fields

_MAX_DIM = 65536  # more is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """`query_rank` None: queries are not compressed. `interleaved`: neighbouring dimensions of the rotated part turn
    together. `magnitude` is yarn's correction of queries and of keys, each."""

    rank: int
    rope_dim: int
    nope_dim: int  # unrotated dimensions of a head's query and key
    value_dim: int  # of a head
    query_rank: int | None
    interleaved: bool
    magnitude: float

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        return float(self.query_dim**-0.5 * self.magnitude**2)

    def layer_weights(self, hidden_size: int, num_heads: int) -> int:
        queries = num_heads * self.query_dim
        down = hidden_size * self.width + num_heads * (self.nope_dim + self.value_dim) * self.rank
        compressed = self.query_rank * (hidden_size + queries) if self.query_rank else hidden_size * queries
        return down + compressed + num_heads * self.value_dim * hidden_size


def read_latent(config: Fields) -> LatentConfig:
    """Absent fields are what transformers' DeepSeek configs make them. Raises BadCheckpoint."""
    rope_dim = config.integer_or("qk_rope_head_dim", 64, maximum=_MAX_DIM)
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", "even, since rope turns pairs")
    return LatentConfig(
        rank=config.integer_or("kv_lora_rank", 512, maximum=_MAX_DIM),
        rope_dim=rope_dim,
        nope_dim=config.integer_or("qk_nope_head_dim", 128, maximum=_MAX_DIM),
        value_dim=config.integer_or("v_head_dim", 128, maximum=_MAX_DIM),
        query_rank=config.integer_or("q_lora_rank", None if config.has_null("q_lora_rank") else 1536, maximum=_MAX_DIM),
        interleaved=config.flag("rope_interleave", default=True),
        magnitude=_magnitude(config),
    )


def latent_scales(config: Fields) -> Scales:
    return Scales(attention=read_latent(config).scale)


def _magnitude(config: Fields) -> float:
    """0.1 * mscale_all_dim * ln(factor) + 1 where the rope is scaled, as DeepSeek's inference/model.py has it."""
    scaling = rope_fields(config)
    kind = scaling.text_or("rope_type", scaling.text_or("type", "default"))
    factor, mscale = scaling.number_or("factor", 1.0), scaling.number_or("mscale_all_dim", 0.0, above=-math.inf)
    return 1.0 if kind == "default" or factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
