"""bitsandbytes: LLM.int8() and NF4."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields
from workers.checkpoint.formats.base import refuse_format, require_value

_THRESHOLD = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format:
    outliers_from: float | None  # inputs so large stay unrounded; None: all are rounded
    label: str = "bitsandbytes-int8"
    encodings: str = "workers.checkpoint.encodings.bitsandbytes:int8_encodings"


@dataclass(frozen=True, slots=True, kw_only=True)
class NF4Format:
    label: str = "bitsandbytes-nf4"
    encodings: str = "workers.checkpoint.encodings.bitsandbytes:nf4_encodings"


def read_bitsandbytes(config: Fields) -> Int8Format | NF4Format:
    """Raises UnsupportedModel or BadCheckpoint."""
    in_8, in_4 = (config.flag(name) or config.flag(f"_{name}") for name in ("load_in_8bit", "load_in_4bit"))
    if in_8 == in_4:
        raise refuse_format(config, "load_in_8bit", "one of load_in_8bit and load_in_4bit is true")
    if in_8:
        threshold = config.number_or("llm_int8_threshold", _THRESHOLD, above=-1.0)
        return Int8Format(outliers_from=threshold if threshold > 0 else None)
    if config.text_or("bnb_4bit_quant_type", "fp4") != "nf4":
        raise refuse_format(config, "bnb_4bit_quant_type", "'nf4' is")
    require_value(config, "bnb_4bit_quant_storage", ("uint8",))
    return NF4Format()
