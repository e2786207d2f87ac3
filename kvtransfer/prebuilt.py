"""Libraries compiled ahead, for machines without a compiler: an image is built on one processor and runs on others.

The folder that BATON_PREBUILT names has each library once an instruction set; the best for this processor is loaded.
A machine with a compiler does not look here: it compiles for its own processor (docs/adr/0008).
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATON_PREBUILT"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """`options` are the compiler's; `needs` are flags of /proc/cpuinfo, all of which a processor must have."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_BF16 = _V4 | {"avx512_bf16"}
_AMX = _BF16 | frozenset("amx_tile amx_bf16".split())
_X86 = (
    InstructionSet(name="amx", options=("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), needs=_AMX),
    InstructionSet(name="bf16", options=("-march=x86-64-v4", "-mavx512bf16"), needs=_BF16),
    InstructionSet(name="v4", options=("-march=x86-64-v4",), needs=_V4),
    InstructionSet(name="v3", options=("-march=x86-64-v3",), needs=_V3),
    InstructionSet(name="v1", options=("-march=x86-64",), needs=frozenset()),
)
_ARM = (InstructionSet(name="v8", options=("-march=armv8-a",), needs=frozenset()),)


def instruction_sets() -> tuple[InstructionSet, ...]:
    return {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}.get(platform.machine().lower(), ())


def file_name(stem: str, instructions: InstructionSet, flags: Iterable[str], sources: Iterable[Path]) -> str:
    """A name with sources and flags, so that a library of another version is never loaded."""
    digest = hashlib.sha256(" ".join((*flags, *instructions.options)).encode())
    for path in sources:
        digest.update(path.read_bytes())
    return f"{stem}-{instructions.name}-{digest.hexdigest()[:16]}.so"


def find(stem: str, flags: Sequence[str], sources: Sequence[Path]) -> Path | None:
    """The best library that this processor can run; None without one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    has = processor_flags()
    runnable = (instructions for instructions in instruction_sets() if instructions.needs <= has)
    paths = (Path(folder) / file_name(stem, instructions, flags, sources) for instructions in runnable)
    return next((path for path in paths if path.is_file()), None)


def processor_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
