"""Finds the modules that the patterns of an adapter's config name. Patterns are a stranger's regular expressions, and
a short one can compute for years: those with more than names and dots run in a process of their own, with limits.

That process runs this file as a script, so it imports nothing from this project.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence

CPU_S = 1
MAX_MEMORY_BYTES = 2**28
PATIENCE_S = 30.0
_NAME = re.compile(r"[\w.\\-]{0,256}")


def first_matches(patterns: Sequence[str], modules: Sequence[str]) -> dict[str, int]:
    """The number of the first pattern that names a module, as PEFT matches them: the end of a name, from a dot on.
    Raises re.error."""
    numbers: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        numbers |= dict.fromkeys((name for name in modules if name not in numbers and compiled.match(name)), number)
    return numbers


def bounded_matches(patterns: Sequence[str], modules: Sequence[str]) -> dict[str, int]:
    """`first_matches` within `CPU_S` and `MAX_MEMORY_BYTES`. Raises ValueError, which says what is wrong."""
    if len(patterns) < 1024 and all(_NAME.fullmatch(pattern) for pattern in patterns):
        return first_matches(patterns, modules)
    asked = json.dumps([patterns, modules])
    done = subprocess.run(
        [sys.executable, "-P", __file__], input=asked, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode:
        limits = f"{CPU_S} s or {MAX_MEMORY_BYTES // 2**20} MiB"
        raise ValueError(f"matching takes more than {limits} (return code {done.returncode}): make them simpler")
    reply = json.loads(done.stdout)
    if isinstance(reply, str):
        raise ValueError(reply)
    return dict(reply)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        reply: dict[str, int] | str = first_matches(*json.load(sys.stdin))
    except (re.error, OverflowError, RecursionError) as error:
        reply = f"not all are regular expressions ({error}): correct them"
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
