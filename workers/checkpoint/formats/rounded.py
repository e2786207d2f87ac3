"""Float checkpoints whose linear weights are rounded as they are loaded: `worker.quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.errors import Misconfigured
from workers.checkpoint.formats.base import WeightFormat

Levels = Literal["int8", "int4", "fp8"]
Quantize = Literal["off", "int8", "int4", "fp8"]
GROUP = 128
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedFormat:
    """Integers by groups of 128 inputs, fp8 by rows. The head is rounded too, to int8 where the others are int4: a
    tied one is a copy beside the embedding, which stays in floating point."""

    levels: Levels
    encodings: str = "workers.checkpoint.encodings.rounded:encodings"

    @property
    def label(self) -> str:
        return f"rounded-{self.levels}" + ("" if self.levels == "fp8" else f"-g{GROUP}")

    def of_layer(self, name: str) -> Levels:
        return "int8" if name in (HEAD, EMBEDDING) and self.levels == "int4" else self.levels

    def num_bytes(self, name: str, num_outputs: int, num_inputs: int) -> int:
        """In memory, of a layer whose scales have two bytes; by a tied head's name or its embedding's."""
        levels = self.of_layer(name)
        groups = 1 if levels == "fp8" else -(-num_inputs // GROUP)
        return num_outputs * (-(-num_inputs * (4 if levels == "int4" else 8) // 8) + 2 * groups)


def rounded_format(levels: Levels, stored: WeightFormat | None) -> RoundedFormat:
    """Raises Misconfigured for a checkpoint that is quantised already."""
    if stored is not None:
        raise Misconfigured(
            f"worker.quantize is {levels}, and the checkpoint is quantised already ({stored.label}): leave quantize "
            "out, or give --model the checkpoint of floats that it was made from",
            param="quantize",
        )
    return RoundedFormat(levels=levels)
