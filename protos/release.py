"""The version of this Baton: the one place that says it. docs/releases.md says what may change between two."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.1.0"
WIRE = 1
"""The version of gRPC between gateways and workers, of KV layouts and of announcements in Redis. A gateway refuses a
worker that has another one."""


@cache
def commit() -> str:
    """The commit that a wheel was built from, else that of the checkout, else ""."""
    try:
        return Path(__file__).with_name("commit.txt").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
