"""Parameters that Baton does not offer: accepted at the value where they change nothing, refused elsewhere."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import UnsupportedParameter

_OFFERED = "this server does not offer it"


@dataclass(frozen=True, slots=True)
class Harmless:
    """The values at which a parameter changes nothing, and why others are refused. Null never changes anything."""

    accepts: Callable[[Any], bool]
    schema: Mapping[str, Any]
    why: str


def one_of(*values: Any, why: str = _OFFERED) -> Harmless:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return Harmless(accepts, {"enum": [*values, None]}, why)


def never(why: str = _OFFERED) -> Harmless:
    return Harmless(lambda value: False, {"type": "null"}, why)


def without_harmless(body: Mapping[str, Any], refusals: Mapping[str, Harmless], *, where: str = "") -> dict[str, Any]:
    """The body without parameters that change nothing. Raises UnsupportedParameter for one that would."""
    kept = dict(body)
    for name in refusals.keys() & body.keys():
        value = kept.pop(name)
        if value is not None and not refusals[name].accepts(value):
            # The value as JSON. reprlib is bounded in depth too: an object may be nested deeper than repr() can go.
            shown = json.dumps(value) if value is True or value is False else reprlib.repr(value)
            raise UnsupportedParameter(
                f"'{where}{name}' is not supported with the value {shown[:80]}{'...' if len(shown) > 80 else ''}: "
                f"{refusals[name].why}; leave it out",
                param=f"{where}{name}",
            )
    return kept
