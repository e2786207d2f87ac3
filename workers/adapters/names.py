"""Adapters in settings: `name=PATH, other=PATH`, and what a name may be. Pure."""

from __future__ import annotations

import re

from protos.errors import InvalidRequest, Misconfigured

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")


def parse_adapters(text: str, setting: str = "adapters") -> dict[str, str]:
    """Paths by name. Raises Misconfigured."""
    paths: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, equals, path = (part.strip() for part in pair.partition("="))
        if not equals or not path:
            raise Misconfigured(f"{setting} = {text!r}: write {pair!r} as NAME=PATH", param=setting)
        if why := why_no_name(name):
            raise Misconfigured(f"{setting} = {text!r}: {why}", param=setting)
        if name in paths:
            raise Misconfigured(f"{setting} = {text!r}: the name {name} is given twice: give each once", param=setting)
        paths[name] = path
    return paths


def check_name(name: str, model: str) -> None:
    """Raises InvalidRequest for a name that no adapter of `model` can have."""
    if why := why_no_name(name):
        raise InvalidRequest(why, param="name")
    if name == model:
        raise InvalidRequest(f"{name!r} is the name of the model itself: give the adapter another one", param="name")


def why_no_name(name: str) -> str:
    if name.endswith(":latest"):
        return f"{name!r} cannot name an adapter: Ollama's API reads it as {name.removesuffix(':latest')!r}"
    if _NAME.fullmatch(name):
        return ""
    allowed = "begin with a letter or digit, and use up to 127 more of A-Z a-z 0-9 . _ : @ + -"
    return f"{name!r} cannot name an adapter: {allowed}"
