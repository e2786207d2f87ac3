"""AWQ, as AutoAWQ writes its version "gemm"."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields
from workers.checkpoint.formats.base import bits_of, group_label, group_size_of, refuse_format

_BITS = (4,)
_OTHER_BACKENDS = ("llm-awq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQFormat:
    group_size: int | None  # None: all inputs are one group
    encodings: str = "workers.checkpoint.encodings.awq:encodings"

    @property
    def label(self) -> str:
        return f"awq-int4{group_label(self.group_size)}"


def read_awq(config: Fields) -> AWQFormat:
    """AutoAWQ's older quant_config.json has w_bit and q_group_size. Raises UnsupportedModel or BadCheckpoint."""
    bits_of(config, _BITS, "bits" if "bits" in config or "w_bit" not in config else "w_bit", default=4)
    layout = "version" if "version" in config else "format"
    if config.text_or(layout, "gemm").lower() != "gemm":
        raise refuse_format(config, layout, "version 'gemm' is", fix=_CONVERT)
    if config.text_or("backend", "autoawq") in _OTHER_BACKENDS:
        raise refuse_format(config, "backend", "checkpoints of AutoAWQ are", fix=_CONVERT)
    if not config.flag("zero_point", default=True):
        raise refuse_format(config, "zero_point", "AWQ with zero points is", fix=_CONVERT)
    size = "q_group_size" if "q_group_size" in config and "group_size" not in config else "group_size"
    return AWQFormat(group_size=group_size_of(config, size, default=128))


_CONVERT = "Quantise the model again with AutoAWQ's version 'gemm', or give --model the one that it was made from"
