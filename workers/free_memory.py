"""Free memory of the machine, read from the kernel. Without torch, so that a supervisor can read it, too."""

from __future__ import annotations

import os
from pathlib import Path

RANK_BYTES = 200 * 2**20
"""Least memory of a rank's process without weights: interpreter, torch, gRPC and Ray (240 MiB measured)."""


def free_ram_bytes(root: Path = Path("/")) -> int:
    """RAM this process may still take: the kernel's available memory, within the container's limit if it has one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass  # not Linux, where free pages would leave out the page cache
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
