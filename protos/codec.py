"""Values that are made for every token, and messages between our own processes: msgpack of a closed list of types.

Pickle is never read: a restricted unpickler lets every class of an imported module through, operator.attrgetter among
them, which leads to exec.

    1 byte: length of the name | the message's name | msgpack of its body, which is of the type listed under that name

A message that is damaged, of another version or from a stranger raises UnreadableMessage. Decoding runs nothing but the
constructors of the listed types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Any

import msgspec

from protos.errors import BatonError, UnreadableMessage

MAX_NAME_BYTES = 255


class Value(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A frozen, slotted value that is compared and hashed by its fields. Making one takes a tenth of a
    microsecond, a frozen dataclass one or two, and Python's garbage collector never scans it: a value holds no
    reference that could lead back to it. `dataclasses.replace`, `asdict` and `fields`, orjson and type checkers treat
    it as a dataclass.

    Subclasses derive from it directly: `class Row(Value, frozen=True, kw_only=True)`. A subclass of a subclass raises
    TypeError. A message has its fields in their order, without their names."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if cls.__bases__ != (Value,):
            raise TypeError(f"{cls.__name__} derives from another value: write its fields down, each value has its own")
        annotated = type(cls.__name__, (), {"__annotations__": get_annotations(cls)})
        described: Any = dataclass(init=False, repr=False, eq=False)(annotated)
        cls.__dataclass_fields__ = described.__dataclass_fields__


class Messages:
    """The messages of one channel: the type of the body by the message's name. Both ends have the same list."""

    def __init__(self, bodies: Mapping[str, Any]) -> None:
        self.bodies = dict(bodies)
        self._prefixes = {name: _prefix(name) for name in bodies}
        self._decoders = {
            name.encode(): (name, msgspec.msgpack.Decoder(body, dec_hook=_from_plain)) for name, body in bodies.items()
        }
        self._encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode

    @classmethod
    def of(cls, *kinds: type) -> Messages:
        """Each value is a message, by the name of its class."""
        return cls({kind.__name__: kind for kind in kinds})

    def encode(self, name: str, body: object) -> bytes:
        """Raises TypeError for a value that msgpack has no form for, KeyError for a name that is not listed."""
        return self._prefixes[name] + self._encode(body)

    def decode(self, packed: bytes) -> tuple[str, Any]:
        """The name and the body. Raises UnreadableMessage."""
        end = 1 + packed[0] if packed else 1
        listed = self._decoders.get(packed[1:end])
        if listed is None:
            raise UnreadableMessage(
                f"a message with the unknown name {packed[1:end][:40]!r}; known: {', '.join(sorted(self.bodies))}; "
                "both ends must run the same version of Baton"
            )
        name, decoder = listed
        try:
            return name, decoder.decode(memoryview(packed)[end:])
        except (ValueError, RecursionError, BatonError) as error:  # msgspec's errors are ValueErrors
            raise UnreadableMessage(
                f"a message {name!r} of {len(packed)} bytes cannot be read: {error}; both ends must run the same "
                "version of Baton"
            ) from error


def _prefix(name: str) -> bytes:
    encoded = name.encode()
    assert 0 < len(encoded) <= MAX_NAME_BYTES, f"{name!r} is no name of a message"
    return bytes((len(encoded),)) + encoded


def _to_plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes: send numbers, texts and values")


def _from_plain(kind: type[Any], plain: Any) -> Path:
    if kind is Path and isinstance(plain, str):
        return Path(plain)
    raise ValueError(f"{kind} cannot be made from {type(plain).__name__}")
