"""FP8 as DeepSeek (blocks) and AutoFP8 (one scale a tensor) write it, under quant_method fp8."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from workers.checkpoint.formats.base import require_value


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Format:
    block: tuple[int, int] | None  # rows and inputs of a scale; None: one scale a tensor
    static: bool  # activations have a stored scale
    encodings: str = "workers.checkpoint.encodings.fp8:encodings"

    @property
    def label(self) -> str:
        return "fp8" if self.block is None else f"fp8-block{self.block[0]}x{self.block[1]}"


def read_fp8(config: Fields) -> FP8Format:
    """Raises UnsupportedModel or BadCheckpoint."""
    require_value(config, "fmt", ("e4m3", "float8_e4m3fn"))
    require_value(config, "activation_scheme", ("dynamic", "static"))
    require_value(config, "scale_fmt", ("ue8m0", "float"))
    block = config.raw("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size < 1 << 31 for size in block)
    ):
        raise BadCheckpoint(
            f"{config.where}: 'weight_block_size' is {block!r}: it must be two sizes, as [128, 128]",
            param="weight_block_size",
        )
    static = config.text_or("activation_scheme", "dynamic") == "static"
    return FP8Format(block=None if block is None else (block[0], block[1]), static=static)
