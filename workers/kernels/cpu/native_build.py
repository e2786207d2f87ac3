"""The CPU's kernels in C++: compiled for this processor at first use, then kept in the user's cache."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import cast

import torch

from kvtransfer import prebuilt
from kvtransfer.native import cache_folder, fingerprint, made_once, run
from kvtransfer.prebuilt import InstructionSet

log = logging.getLogger("baton.worker")

_FOLDER = Path(__file__).parent
_FLAGS = "-std=c++20 -O3 -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -fPIC -w".split()
_SOURCES = {
    "elementwise.cpp": "-ffp-contract=off",  # rounds where torch rounds, to equal it
    "attention.cpp": "-ffp-contract=fast",
    "latent.cpp": "-ffp-contract=fast",
    "attention_rounded.cpp": "-ffp-contract=fast",
    "attention_tiles.cpp": "-ffp-contract=fast",
    "products.cpp": "-ffp-contract=off",
    "products_tiles.cpp": "-ffp-contract=fast",
    "experts.cpp": "-ffp-contract=off",
    "quantised.cpp": "-ffp-contract=off",
    "quantised_floats.cpp": "-ffp-contract=off",
    "quantised_integers.cpp": "-ffp-contract=off",
    "layers.cpp": "",
    "packing.cpp": "",
    "rounding.cpp": "-ffp-contract=off",
    "threads.cpp": "",
}

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "norm": (*[_P] * 4, *[_N] * 5, _F, _I, _I),
    "add_norm": (*[_P] * 6, *[_N] * 3, _F, _I, _I),
    "silu_mul": (*[_P] * 2, *[_N] * 3, _I),
    "gelu_tanh_mul": (*[_P] * 2, *[_N] * 3, _I),
    "activate": (*[_P] * 2, *[_N] * 4, _I, _I),
    "rope_kv_write": (*[_P] * 3, *[_N] * 4, *[_P] * 5, *[_N] * 5, _I),
    "attend": (*[_P] * 7, *[_N] * 8, *[_F] * 2, _I),
    "attend_latent": (*[_P] * 6, *[_N] * 8, _F, _I),
    "head_products": (*[_P] * 3, *[_N] * 8, _I),
    "pack_panels": (*[_P] * 3, *[_N] * 2, _I),
    "multiply_panels": (*[_P] * 3, *[_N] * 3, _I),
    "multiply_quantised": (*[_P] * 3, *[_N] * 3, _I),
    "multiply_router": (*[_P] * 3, *[_N] * 3, _I),
    "multiply_experts": (*[_P] * 3, *[_N] * 3, _I),
    "multiply_terms": (*[_P] * 3, *[_N] * 3, _I),
    "run_layers": (_P, _N, _N, _P),
    "largest": (_P, _N, _P, *[_N] * 3, _I),
    "round_rows": (_P, _N, *[_P] * 2, *[_N] * 3, _I, _I),
}
_OF_BOTH = {
    "pack_codes": (_P, _N, *[_P] * 3, *[_N] * 3, *[_I] * 3),
    "read_quantised": (*[_P] * 3, _N, _I),
}
TIMEOUT_S = 120.0  # of one file's compilation, while a worker waits
PATIENT_TIMEOUT_S = 1800.0  # while only a person waits
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Native:
    """The compiled functions of one dtype, called with `Tensor.data_ptr()`, sizes and the number of threads.

    elementwise.cpp, attention.cpp, latent.cpp, products.cpp, packing.cpp, rounding.cpp and layers.cpp have their
    arguments. Nothing is checked: callers own shapes and strides.
    """

    def __init__(self, library: ctypes.CDLL, dtype: str) -> None:
        for name, arguments in _ARGUMENTS.items():
            setattr(self, name.removesuffix("_panels"), _declared(library, f"{name}_{dtype}", arguments))
        for name, arguments in _OF_BOTH.items():
            setattr(self, name, _declared(library, name, arguments))

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(name)


class Tiles:
    """The compiled functions for processors with AMX, on bfloat16: products_tiles.cpp and attention_tiles.cpp have
    their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.attend = _declared(library, "attend_tiles", _ARGUMENTS["attend"])
        self.pack = _declared(library, "pack_tiles", _ARGUMENTS["pack_panels"])
        self.multiply = _declared(library, "multiply_tiles", _ARGUMENTS["multiply_panels"])


def _declared(library: ctypes.CDLL, name: str, arguments: Sequence[type]) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return cast(Callable[..., None], function)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """The addresses of tensors, which must outlive their use."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def address_of(function: Callable[..., None]) -> int:
    """The address of a compiled function, for a C structure."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


@cache
def native_tiles() -> Tiles | None:
    """None if the processor has no AMX, the system does not permit it, or nothing can be compiled."""
    library = _library()
    return Tiles(library) if library is not None and library.has_tiles() else None


@cache
def native(dtype: torch.dtype) -> Native | None:
    """The kernels for tensors of `dtype`; None if torch must compute. Compiles at the first call (seconds)."""
    library = _library() if dtype in _DTYPES else None
    return None if library is None else Native(library, _DTYPES[dtype])


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(compile_library(cache_folder())))
    except subprocess.TimeoutExpired as error:
        log.warning(
            "the CPU kernels are not compiled, slower torch code replaces them until the next start: the compiler did "
            "not finish in %.0f s (%s). Run python -m workers.kernels.cpu once, which waits %.0f s, then start again",
            error.timeout,
            " ".join(map(str, error.cmd)),
            PATIENT_TIMEOUT_S,
        )
        return None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home folder
        reason = getattr(error, "stderr", "") or error
        log.warning("the CPU kernels are not compiled, slower torch code replaces them: %s", reason)
        return None


def compile_library(folder: Path, machine: str = "native", *, timeout_s: float = TIMEOUT_S) -> Path:
    """Returns the library in `folder`, compiled unless it exists, for this processor or for the `-march` of a lesser
    one; without a compiler, a prebuilt one. Its name has sources, flags, compiler and processor, so that different
    machines may share a folder. Raises OSError, or SubprocessError (also when a file takes longer than `timeout_s`)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        ready = prebuilt.find("cpu", _prebuilt_flags(), _sources())
        if ready is not None:
            return ready
        raise FileNotFoundError("there is no C++ compiler: install g++, or name one with CXX")
    flags = [*_FLAGS, f"-march={machine}"]
    path = folder / f"cpu-{fingerprint(compiler, [*flags, *_SOURCES.values()], _sources())}.so"
    return made_once(path, lambda made: _compile(compiler, flags, made, timeout_s))


def prebuild_library(folder: Path, instructions: InstructionSet) -> Path:
    """The library in `folder` for machines that have these instructions and no compiler. Raises SubprocessError."""
    path = folder / prebuilt.file_name("cpu", instructions, _prebuilt_flags(), _sources())
    return made_once(path, lambda made: _compile("g++", [*_FLAGS, *instructions.options], made, PATIENT_TIMEOUT_S))


def _prebuilt_flags() -> list[str]:
    return [*_FLAGS, *_SOURCES.values()]


def _sources() -> list[Path]:
    return [*sorted(_FOLDER.glob("*.h")), *(_FOLDER / name for name in _SOURCES)]


def _compile(compiler: str, flags: Sequence[str], made: Path, timeout_s: float) -> None:
    """Compiles all sources in parallel."""
    parts = {name: str(made.with_name(f"{name}.o")) for name in _SOURCES}

    def compile_one(name: str) -> None:
        options = [*flags, *_SOURCES[name].split()]
        run(compiler, *options, "-c", str(_FOLDER / name), "-o", parts[name], timeout_s=timeout_s)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(compile_one, _SOURCES))
    run(compiler, "-shared", "-pthread", *parts.values(), "-o", str(made), timeout_s=timeout_s)
