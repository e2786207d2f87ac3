"""EXL2, as exllamav2 writes it: groups of 2 to 8 bits within one layer."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class EXL2Format:
    bits: float  # on average, of all layers but the head
    encodings: str = "workers.checkpoint.encodings.exl2:encodings"

    @property
    def label(self) -> str:
        return f"exl2-{self.bits:g}bpw"


def read_exl2(config: Fields) -> EXL2Format:
    return EXL2Format(bits=config.number_or("bits", 0.0))
