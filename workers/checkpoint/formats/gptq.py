"""GPTQ, as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from protos.model_files.fields import Fields
from workers.checkpoint.formats.base import bits_of, check_pattern, group_label, group_size_of, refuse_format

_BITS = (2, 3, 4, 8)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format: what is added to a stored zero


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQFormat:
    """`overrides` are other sizes for layers whose name matches a pattern, the first that does."""

    bits: int
    group_size: int | None  # None: all inputs are one group
    zero_offset: int
    overrides: tuple[tuple[str, GPTQFormat], ...] = ()
    encodings: str = "workers.checkpoint.encodings.gptq:encodings"

    @property
    def label(self) -> str:
        mixed = "-mixed" if self.overrides else ""
        return f"gptq-int{self.bits}{group_label(self.group_size)}{mixed}"

    def of_layer(self, name: str) -> GPTQFormat:
        for pattern, other in self.overrides:
            if re.match(pattern, name):
                return other
        return replace(self, overrides=())


def read_gptq(config: Fields) -> GPTQFormat:
    """Raises UnsupportedModel or BadCheckpoint, naming the field."""
    layout = "checkpoint_format" if "checkpoint_format" in config else "format"
    named = config.text_or(layout, "gptq")
    if named not in _ZERO_OFFSETS or config.flag("is_marlin_format"):
        field = layout if named not in _ZERO_OFFSETS else "is_marlin_format"
        raise refuse_format(config, field, "checkpoint_format 'gptq' and 'gptq_v2' are")
    whole = GPTQFormat(
        bits=bits_of(config, _BITS),
        group_size=group_size_of(config, default=128),
        zero_offset=_ZERO_OFFSETS[named],
    )
    return replace(whole, overrides=tuple(_overrides(config, whole)))


def _overrides(config: Fields, whole: GPTQFormat) -> list[tuple[str, GPTQFormat]]:
    """Of `dynamic`. Layers whose pattern begins with "-:" are stored as floats, which their tensors show."""
    rules, found = config.inner("dynamic"), []
    for key in rules.names():
        pattern, excluded = key.removeprefix("+:").removeprefix("-:"), key.startswith("-:")
        check_pattern(pattern, rules)
        if excluded:
            found.append((pattern, whole))
            continue
        rule = rules.inner(key)
        bits = bits_of(rule, _BITS, default=whole.bits)
        size = group_size_of(rule) if "group_size" in rule else whole.group_size
        found.append((pattern, replace(whole, bits=bits, group_size=size)))
    return found
