"""Prices by date and model, and what a bad file is refused with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from protos.errors import Misconfigured
from router.observe.ledger.prices import read_prices

FILE = """
device_hour = 2.5

[[price]]
since = 2026-01-01
input = 1.0
cached = 0.1
output = 4.0

[[price]]
since = 2026-06-01
model = "small"
input = 0.5
cached = 0.0
output = 1
"""
TOKENS = {"input": 1_000_000, "cached": 2_000_000, "output": 500_000}


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_request_is_charged_by_the_prices_of_its_time(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(FILE)
    prices = read_prices(tmp_path / "prices.toml")
    assert prices.device_hour == 2.5
    assert prices.price("large", at("2025-12-31T23:59:59")) is None
    for model, when, version, usd in (
        ("large", "2026-01-01T00:00:00", "2026-01-01 *", 1.0 + 0.2 + 2.0),
        ("small", "2026-05-31T23:59:59", "2026-01-01 *", 3.2),
        ("small", "2026-06-01T00:00:00", "2026-06-01 small", 0.5 + 0.5),
    ):
        price = prices.price(model, at(when))
        assert price is not None
        assert price.version == version
        assert sum(price.charge(TOKENS).values()) == pytest.approx(usd)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[price", "is not TOML"),
        ("device_hours = 1", "did you mean 'device_hour'"),
        ("device_hour = -1", "device_hour = -1: give USD"),
        ("[[price]]\nsince = 2026-01-01\ninput = 1\ncached = 1", "price 1 has no output"),
        (2 * "[[price]]\nsince = 2026-01-01\ninput = 1\ncached = 1\noutput = 1\n", "price 1 and price 2 are both for"),
        ("[[price]]\ninput = 1\ncached = 1\noutput = 1", "price 1 has no since: give the date from which it holds"),
        ("[[price]]\nsince = '2026'\ninput = 1\ncached = 1\noutput = 1", "since = '2026': give a date"),
        (
            "[[price]]\nsince = 2026-01-01\nmodel = 3\ninput = 1\ncached = 1\noutput = 1",
            "model = 3: give a served name",
        ),
        ("[[price]]\nsince = 2026-01-01\ninput = nan\ncached = 1\noutput = 1", "input = nan: give USD"),
        ("price = 3", "price = 3: give tables"),
    ],
)
def test_a_bad_file_is_refused_by_its_entry(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(Misconfigured, match=error):
        read_prices(tmp_path / "prices.toml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"prices: .*none\.toml"):
        read_prices(tmp_path / "none.toml")
