"""C and C++ beside the Python that calls it: compiled when first wanted, for this very processor, and then kept.

Nothing is downloaded. Without a compiler, libraries that were built ahead are taken (`kvtransfer.prebuilt`). Without
those, or where the cache cannot be written, `load` logs it once and returns None: every caller has a twin in Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtransfer import prebuilt
from kvtransfer.prebuilt import InstructionSet

log = logging.getLogger("baton.kernels")

_FLAGS = "-std=c11 -O2 -fPIC -shared".split()
_NATIVE = ("-march=native",)
_TIMEOUT_S = 60.0


Functions = Mapping[str, tuple[Sequence[type], type | None]]
"""The functions of a library: their arguments and results."""


def load(source: Path, functions: Functions | None = None) -> ctypes.PyDLL | None:
    """The library of one C file, compiled at the first call on a machine (half a second). Calls keep Python's lock.
    The caller keeps the library alive."""
    try:
        library = ctypes.PyDLL(str(compile_c(source, cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home folder
        reason = getattr(error, "stderr", "") or error
        log.warning("%s is not compiled, slower Python code replaces it: %s", source.name, reason)
        return None
    for name, (arguments, result) in (functions or {}).items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def compile_c(source: Path, folder: Path) -> Path:
    """Returns the library in `folder`, compiled unless it exists; without a compiler, a prebuilt one. Its name has
    source, flags, compiler and processor, so that different machines may share a folder. Raises OSError or
    SubprocessError."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        ready = prebuilt.find(source.stem, _FLAGS, [source])
        if ready is not None:
            return ready
        raise FileNotFoundError("there is no C compiler: install gcc, or name one with CC")
    flags = [*_FLAGS, *_NATIVE]
    path = folder / f"{source.stem}-{fingerprint(compiler, flags, [source])}.so"
    return made_once(path, lambda made: run(compiler, *flags, str(source), "-o", str(made), timeout_s=_TIMEOUT_S))


def prebuild_c(source: Path, folder: Path, instructions: InstructionSet) -> Path:
    """The library in `folder` for machines that have these instructions and no compiler. Raises SubprocessError."""
    path = folder / prebuilt.file_name(source.stem, instructions, _FLAGS, [source])
    command = ["gcc", *_FLAGS, *instructions.options, str(source)]
    return made_once(path, lambda made: run(*command, "-o", str(made), timeout_s=_TIMEOUT_S))


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Returns `path`. If it is missing, it is made in another folder and moved, so that no process sees half of it. Of
    processes that start together one makes it, and the others wait. Raises the errors of `make`, or OSError."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _sole_maker(path):
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                    made = Path(scratch) / path.name
                    make(made)
                    made.replace(path)
    return path


@contextmanager
def _sole_maker(path: Path) -> Iterator[None]:
    with open(path.with_name(f".{path.name}.lock"), "wb") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint(compiler: str, flags: Iterable[str], sources: Iterable[Path]) -> str:
    """A hash of everything a library depends on: compiler, flags, sources and processor."""
    identity = hashlib.sha256(" ".join((compiler, *flags, processor())).encode())
    identity.update(subprocess.check_output([compiler, "--version"], timeout=_TIMEOUT_S))
    for path in sources:
        identity.update(path.read_bytes())
    return identity.hexdigest()[:16]


def run(*command: str, timeout_s: float) -> None:
    """Raises SubprocessError, with the compiler's output in its `stderr`."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "baton"


def processor() -> str:
    """The processor's features, which decide `-march=native`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(facts)])
