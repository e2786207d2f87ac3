"""Sums of the ledger: tokens, what they are charged, and what they cost, with the idle rest beside them.

cost of a group = its device seconds * USD of a device second
idle            = (device seconds that there were - those of all requests) * the same
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from protos.errors import InvalidRequest
from router.database.database import Database, Row
from router.observe.ledger.ledger_tables import CHARGED, SUMMED, SUMS, WHOLE, WORKER_TOKENS
from router.observe.ledger.prices import PriceList
from router.observe.ledger.retention import HOUR_S, kept_times, rows_from, whole_hours

GroupBy = Literal["tenant", "key_id", "model", "kind", "endpoint", "outcome", "batch"]
GROUPS: tuple[str, ...] = get_args(GroupBy)
_OF_KIND: Mapping[str, Sequence[str]] = {
    "input": ("input_tokens", "prefill_device_s", "prefill_kv_byte_s"),
    "cached": ("cached_tokens", "cache_saved_device_s"),
    "output": (
        "output_tokens", "reasoning_tokens", "decode_device_s", "decode_kv_byte_s", "drafted_tokens", "accepted_tokens",
        "speculation_saved_device_s",
    ),
}  # fmt: skip
"""Columns of a kind's tokens; `charged_KIND_usd` is charged for them."""
UNKNOWN_KIND = "unknown"
LEAST_USD = 1e-9
_BATCH = ("no", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """Requests of one group within [`start_s`, `end_s`)."""

    start_s: int
    end_s: int
    group: Mapping[str, str]
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_device_s: float = 0.0
    decode_device_s: float = 0.0
    charged_usd: float = 0.0
    accepted_tokens: int = 0
    cache_saved_device_s: float = 0.0
    speculation_saved_device_s: float = 0.0
    drafted_tokens: int = 0
    prefill_kv_byte_s: float = 0.0
    decode_kv_byte_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Endpoints whose requests are summed: `only` these, or all `without` these."""

    only: Sequence[str] = ()
    without: Sequence[str] = ()

    @property
    def condition(self) -> str:
        places = ", ".join("?" * len(self.values))
        return f" AND endpoint {'IN' if self.only else 'NOT IN'} ({places})" if places else ""

    @property
    def values(self) -> Sequence[str]:
        return self.only or self.without


def sums(
    database: Database,
    *,
    since_s: int,
    until_s: int,
    by: Sequence[str] = (),
    bucket_s: int | None = None,
    endpoints: Endpoints = Endpoints(),
) -> list[UsageSum]:
    """Sums by time, then group, without empty buckets; one bucket without `bucket_s`. By kind, a request counts in
    each kind of tokens. Raises InvalidRequest or Unavailable."""
    check_groups(by)
    names, columns = [name for name in by if name != "kind"], (*SUMMED, *(CHARGED if "kind" in by else ()))
    width = bucket_s or max(1, until_s - since_s)
    places = ", ".join(str(place) for place in range(1, 2 + len(names)))
    source, values = _source(names, columns, since_s, until_s, bucket_s, endpoints)
    summed = ", ".join(f"{_sum(name)} AS {name}" for name in ("requests", *columns))
    with database.reading() as transaction:
        _check_kept(rows_from(transaction), since_s, until_s, bucket_s)
        bucket = transaction.whole("(at_s - ?) / ?")
        rows = transaction.run(
            f"SELECT {', '.join((f'{bucket} AS bucket', *names))}, {summed} FROM ({source}) AS parts "
            f"GROUP BY {places} ORDER BY {places}",
            since_s, width, *values,
        )  # fmt: skip
    usage: list[UsageSum] = []
    for row in rows:
        start_s = since_s + row["bucket"] * width
        whole = UsageSum(
            start_s=start_s,
            end_s=min(until_s, start_s + width),
            group={name: _BATCH[row[name]] if name == "batch" else row[name] for name in names},
            **{name: row[name] for name in ("requests", *SUMMED)},
        )
        usage += _by_kind(whole, row) if "kind" in by else [whole]
    return usage


def _by_kind(whole: UsageSum, row: Row) -> Iterator[UsageSum]:
    """Charges of old versions have the kind "unknown"."""
    left_usd = whole.charged_usd
    parts: Mapping[str, Any] = {"start_s": whole.start_s, "end_s": whole.end_s}
    for kind, names in _OF_KIND.items():
        usd = row[f"charged_{kind}_usd"]
        left_usd -= usd
        own = {name: row[name] for name in names} | {"requests": whole.requests, "charged_usd": usd}
        yield UsageSum(**parts, group={**whole.group, "kind": kind}, **own)
    if left_usd > LEAST_USD:
        yield UsageSum(**parts, group={**whole.group, "kind": UNKNOWN_KIND}, charged_usd=left_usd)


def _check_kept(rows_from_s: int, since_s: int, until_s: int, bucket_s: int | None) -> None:
    is_whole = whole_hours(since_s, until_s, rows_from_s) == (since_s, until_s)
    if since_s < rows_from_s and not (is_whole and (bucket_s or HOUR_S) % HOUR_S == 0):
        day = datetime.fromtimestamp(rows_from_s, UTC).date()
        raise InvalidRequest(f"single requests are kept from {day} on: before, ask for whole hours or days (UTC)")


def _sum(name: str) -> str:
    """Casts a sum: Postgres would return a decimal."""
    return f"CAST(sum({name}) AS BIGINT)" if name in WHOLE or name == "requests" else f"sum({name})"


def _source(
    by: Sequence[str], summed: Sequence[str], since_s: int, until_s: int, bucket_s: int | None, endpoints: Endpoints
) -> tuple[str, Sequence[int | str]]:
    """Takes sums of whole days and hours if a bucket holds them, and single requests for the rest."""
    widths = [width for width in SUMS if bucket_s is None or (bucket_s % width == 0 and since_s % width == 0)]
    parts = _cut(since_s, until_s, widths)
    columns = ", ".join(("at_s", *by)), ", ".join(summed)
    selects = [
        f"SELECT {columns[0]}, {'requests' if table in SUMS.values() else '1 AS requests'}, {columns[1]} FROM {table} "
        f"WHERE at_s >= ? AND at_s < ?{endpoints.condition}"
        for table, _, _ in parts
    ]
    values: list[int | str] = []
    for _, *times in parts:
        values += [*times, *endpoints.values]
    return " UNION ALL ".join(selects), values


def _cut(since_s: int, until_s: int, widths: Sequence[int]) -> list[tuple[str, int, int]]:
    if not widths:
        return [("requests", since_s, until_s)]
    width, *shorter = widths
    first, last = -(-since_s // width) * width, until_s // width * width
    if first >= last:
        return _cut(since_s, until_s, shorter)
    before = _cut(since_s, first, shorter) if since_s < first else []
    after = _cut(last, until_s, shorter) if last < until_s else []
    return [*before, (SUMS[width], first, last), *after]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """`since`, `until`, `rows_from`: seconds since 1970; single requests are kept from `rows_from` on, and earlier
    times are widened to whole hours. `idle_usd`: the part of `fleet_usd` that no request used. `worker_*_tokens`:
    the workers' own counts."""

    since: int
    until: int
    rows_from: int
    rows: tuple[UsageSum, ...]
    device_hour_usd: float
    fleet_device_s: float
    fleet_usd: float
    idle_usd: float
    worker_prompt_tokens: int
    worker_output_tokens: int

    @property
    def unrecorded_output_tokens(self) -> int:
        """Tokens that workers reported and no row has: running, cut, abandoned or lost answers. Negative if answers
        began before `since`."""
        return self.worker_output_tokens - sum(row.output_tokens for row in self.rows)

    def cost_usd(self, row: UsageSum) -> float:
        return (row.prefill_device_s + row.decode_device_s) * self.device_hour_usd / HOUR_S

    def saved_usd(self, row: UsageSum) -> Mapping[str, float]:
        usd = self.device_hour_usd / HOUR_S
        return {
            "cache_saved_usd": row.cache_saved_device_s * usd,
            "speculation_saved_usd": row.speculation_saved_device_s * usd,
        }


def costs(database: Database, prices: PriceList, *, since_s: int, until_s: int, by: Sequence[str]) -> CostReport:
    """Raises InvalidRequest and Unavailable."""
    since_s, until_s, rows_from_s = kept_times(database, since_s, until_s)
    rows = tuple(sums(database, since_s=since_s, until_s=until_s, by=by))
    first, last = since_s // 60, -(-until_s // 60)
    with database.reading() as transaction:
        [minutes] = transaction.run(
            "SELECT CAST(coalesce(sum(devices), 0) AS BIGINT) AS devices FROM model_devices "
            "WHERE minute >= ? AND minute < ?",
            first, last,
        )  # fmt: skip
        [computed] = transaction.run(WORKER_TOKENS, first, first, first, last)
    there_s = 60.0 * minutes["devices"]
    used_s = sum(row.prefill_device_s + row.decode_device_s for row in rows)
    usd = prices.device_hour / HOUR_S
    return CostReport(
        since=since_s,
        until=until_s,
        rows_from=rows_from_s,
        rows=rows,
        device_hour_usd=prices.device_hour,
        fleet_device_s=there_s,
        fleet_usd=there_s * usd,
        idle_usd=max(0.0, there_s - used_s) * usd,
        worker_prompt_tokens=int(computed["prompt_tokens"]),
        worker_output_tokens=int(computed["output_tokens"]),
    )


def spent_by_tenant(database: Database, since_s: int) -> dict[str, float]:
    """Raises Unavailable."""
    query = "SELECT tenant, sum(charged_usd) AS usd FROM days WHERE at_s >= ? GROUP BY tenant"
    with database.reading() as transaction:
        return {row["tenant"]: row["usd"] for row in transaction.run(query, since_s)}


def check_groups(by: Sequence[str]) -> None:
    """Raises InvalidRequest."""
    if unknown := [name for name in by if name not in GROUPS]:
        raise InvalidRequest(f"by={unknown[0][:40]}: give some of {', '.join(GROUPS)}", param="by")
