"""gpt-oss's experts in MXFP4, everything else in floating point."""

from __future__ import annotations

from dataclasses import dataclass

from protos.model_files.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Format:
    label: str = "mxfp4"
    encodings: str = "workers.checkpoint.encodings.mxfp4:encodings"


def read_mxfp4(config: Fields) -> MXFP4Format:
    """Which layers are quantised is seen in the files."""
    return MXFP4Format()
