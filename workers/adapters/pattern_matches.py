"""Finds the modules that the patterns of an adapter's config name.

A script of `protos.limited`, without imports from this project: a pattern is a stranger's regular expression, and a
short one can compute for years.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence


def first_matches(patterns: Sequence[str], modules: Sequence[str]) -> dict[str, int]:
    """The index of the first pattern that matches a module, as PEFT matches: the end of a name after a dot. Raises
    re.error."""
    numbers: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        numbers |= dict.fromkeys((name for name in modules if name not in numbers and compiled.match(name)), number)
    return numbers


def make_answer() -> Callable[[bytes], bytes]:
    def answer(request: bytes) -> bytes:
        try:
            reply: dict[str, int] | str = first_matches(*json.loads(request))
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            reply = f"not all are regular expressions ({error}): correct them"
        return json.dumps(reply).encode()

    return answer
