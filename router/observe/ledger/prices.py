"""Prices from a TOML file, in USD.

device_hour = 2.50             # what one device costs, busy or not

[[price]]
since = 2026-01-01             # dates are UTC; a later entry replaces an earlier one
model = "*"                    # or the served name; an adapter without a price has its model's
input = 0.50                   # a million tokens: computed prompt tokens,
cached = 0.05                  # prompt tokens from a prefix cache,
output = 1.50                  # and answers
batch = 0.5                    # times all of these for requests of batches; by default half"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from protos.errors import Misconfigured
from protos.hints import suggested, unusable

KINDS = ("input", "cached", "output")
BATCH = 0.5
"""Times the price of people's requests, as OpenAI and others have it."""
_PER = 1e6
_KNOWN = {"since", "model", "batch", *KINDS}
NO_PRICES = (
    "tenants have budgets, and there is no ledger with prices to hold them to: set router.ledger.path and "
    "router.ledger.prices (docs/economics.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD for a million tokens of each kind of one model, or of all ("*"), from `since_s` (seconds since 1970)
    on."""

    since_s: float
    model: str
    usd: Mapping[str, float]
    batch: float = BATCH

    @property
    def version(self) -> str:
        return f"{datetime.fromtimestamp(self.since_s, UTC):%Y-%m-%d} {self.model}"

    def charge(self, tokens: Mapping[str, int], *, is_batch: bool = False) -> Mapping[str, float]:
        factor = (self.batch if is_batch else 1.0) / _PER
        return {kind: self.usd[kind] * tokens[kind] * factor for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """`device_hour`: USD for a device and hour. Without a file everything is free."""

    device_hour: float = 0.0
    prices: tuple[Price, ...] = ()

    def price(self, model: str, at_s: float, *, parent: str = "") -> Price | None:
        """The price of the model, else of an adapter's parent, else of all models."""
        for name in (model, parent, "*"):
            dated = [price for price in self.prices if price.model == name and price.since_s <= at_s]
            if dated:
                return max(dated, key=lambda price: price.since_s)
        return None


def read_prices(path: Path) -> PriceList:
    """Raises Misconfigured."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Misconfigured(f"prices: {path}: {unusable(error)}", param="router.ledger.prices") from error
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"prices: {path} is not TOML: {error}", param="router.ledger.prices") from error
    _known(document, {"device_hour", "price"}, "at the top")
    entries = document.get("price", [])
    if not isinstance(entries, list):
        raise _wrong("price", entries, "tables [[price]]")
    prices = tuple(_price(number, entry) for number, entry in enumerate(entries, 1))
    numbers: dict[tuple[str, float], int] = {}
    for number, price in enumerate(prices, 1):
        first = numbers.setdefault((price.model, price.since_s), number)
        if first != number:
            raise Misconfigured(
                f"prices: price {first} and price {number} are both for {price.model!r} from {price.version[:10]} on: "
                "leave one out, or change a date",
                param="router.ledger.prices",
            )
    return PriceList(device_hour=_usd("device_hour", document.get("device_hour", 0.0)), prices=prices)


def _price(number: int, entry: Any) -> Price:
    where = f"price {number}"
    if not isinstance(entry, dict):
        raise _wrong(where, entry, "a table [[price]]")
    _known(entry, _KNOWN, f"in {where}")
    if missing := [name for name in ("since", *KINDS) if name not in entry]:
        what = "the date from which it holds, as 2026-01-31" if missing[0] == "since" else "USD for a million tokens"
        raise Misconfigured(f"prices: {where} has no {missing[0]}: give {what}", param="router.ledger.prices")
    since, model = entry["since"], entry.get("model", "*")
    if type(since) is not date:
        raise _wrong(f"{where}: since", since, "a date, as 2026-01-31")
    if not isinstance(model, str) or not model:
        raise _wrong(f"{where}: model", model, 'a served name, or "*" for all')
    begins = datetime(since.year, since.month, since.day, tzinfo=UTC).timestamp()
    return Price(
        since_s=begins,
        model=model,
        usd={kind: _usd(f"{where}: {kind}", entry[kind]) for kind in KINDS},
        batch=_usd(f"{where}: batch", entry.get("batch", BATCH)),
    )


def _usd(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise _wrong(where, value, "USD, a number from 0")
    return float(value)


def _wrong(where: str, value: Any, allowed: str) -> Misconfigured:
    return Misconfigured(f"prices: {where} = {value!r}: give {allowed}", param="router.ledger.prices")


def _known(found: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in found:
        if name not in known:
            raise Misconfigured(
                f"prices: there is no {name!r} {where}: {suggested(name, known)}", param="router.ledger.prices"
            )
