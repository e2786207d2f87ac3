"""The hardware that a figure was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from protos.release import VERSION, commit

PACKAGES = ("torch", "triton", "ray", "grpcio", "fastapi", "uvicorn", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`num_cores`: those this process may use."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    system: str


def find_hardware(cpuinfo: Path = Path("/proc/cpuinfo")) -> Hardware:
    return Hardware(
        cpu=cpu_model(cpuinfo),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
        system=platform.platform(),
    )


def cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def find_versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version(), "baton": f"{VERSION} {commit()}".strip()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in output.splitlines() if line.strip())
