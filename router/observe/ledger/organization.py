"""OpenAI's objects for what an organization used and what it is charged: pages of buckets of time, newest last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.database.database import Database
from router.observe.ledger.ledger_report import Endpoints, UsageSum, sums
from router.observe.ledger.retention import kept_times

WIDTHS: Mapping[str, tuple[int, int, int]] = {"1m": (60, 60, 1440), "1h": (3600, 24, 168), "1d": (86400, 7, 31)}
"""Seconds of a bucket; how many a page has, by default and at most."""
MAX_COST_DAYS = 180
GROUPS: Mapping[str, str] = {"project_id": "tenant", "api_key_id": "key_id", "model": "model", "batch": "batch"}
"""Columns of the ledger by OpenAI's names."""
USAGE_GROUPS = (*GROUPS, "user_id", "service_tier")
VECTOR_GROUPS = ("project_id", "user_id", "api_key_id", "model")
_SILENT = ("embeddings", "rerank", "score")
VECTOR_ENDPOINTS = (*_SILENT, "ollama.embed", *(f"batch:/v1/{name}" for name in _SILENT))
COST_GROUPS = ("project_id", "api_key_id", "line_item")
LINE_ITEMS: Mapping[str, str] = {"input": "input_tokens", "cached": "cached_tokens", "output": "output_tokens"}
"""Kinds of tokens, and the sums that have their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """`count` buckets of `width_s` seconds from `start_s` on, none behind `end_s`."""

    start_s: int
    end_s: int
    width_s: int
    count: int
    by: tuple[str, ...]

    @property
    def stop_s(self) -> int:
        return min(self.end_s, self.start_s + self.count * self.width_s)


def usage_page(database: Database, asked: PageQuery) -> dict[str, Any]:
    return _page(database, asked, lambda row: _usage(row, asked.by), Endpoints(without=VECTOR_ENDPOINTS))


def vector_usage_page(database: Database, asked: PageQuery) -> dict[str, Any]:
    return _page(database, asked, lambda row: _vector_usage(row, asked.by), Endpoints(only=VECTOR_ENDPOINTS))


def costs_page(database: Database, asked: PageQuery) -> dict[str, Any]:
    return _page(database, asked, lambda row: _charge(row, asked.by), Endpoints())


def _page(database: Database, asked: PageQuery, shown: Any, endpoints: Endpoints) -> dict[str, Any]:
    since_s, until_s, _ = kept_times(database, asked.start_s, asked.stop_s)
    usage = sums(
        database, since_s=since_s, until_s=until_s, by=_columns(asked.by), bucket_s=asked.width_s, endpoints=endpoints
    )
    by_start: dict[int, list[UsageSum]] = {}
    for row in usage:
        by_start.setdefault(row.start_s, []).append(row)
    buckets = [
        {
            "object": "bucket",
            "start_time": start_s,
            "end_time": min(asked.stop_s, start_s + asked.width_s),
            "results": [shown(row) for row in by_start.get(start_s, ())],
        }
        for start_s in range(asked.start_s, asked.stop_s, asked.width_s)
    ]
    has_more = asked.stop_s < asked.end_s
    return {
        "object": "page",
        "data": buckets,
        "has_more": has_more,
        "next_page": str(asked.stop_s) if has_more else None,
    }


def _columns(by: Sequence[str]) -> list[str]:
    names = [GROUPS[name] for name in by if name in GROUPS]
    return [*names, "model", "kind"] if "line_item" in by else names


def _usage(row: UsageSum, by: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": row.input_tokens + row.cached_tokens,
        "input_cached_tokens": row.cached_tokens,
        "input_uncached_tokens": row.input_tokens,
        "input_audio_tokens": 0,
        "output_tokens": row.output_tokens,
        "output_audio_tokens": 0,
        "num_model_requests": row.requests,
        **_names(row, by, ("project_id", "user_id", "api_key_id", "model", "service_tier")),
        "batch": row.group["batch"] == "yes" if "batch" in by else None,
    }


def _vector_usage(row: UsageSum, by: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "organization.usage.embeddings.result",
        "input_tokens": row.input_tokens + row.cached_tokens,
        "num_model_requests": row.requests,
        **_names(row, by, VECTOR_GROUPS),
    }


def _charge(row: UsageSum, by: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "organization.costs.result",
        "amount": {"value": row.charged_usd, "currency": "usd"},
        "line_item": f"{row.group['model']}, {row.group['kind']}" if "line_item" in by else None,
        "quantity": getattr(row, LINE_ITEMS[row.group["kind"]], None) if row.group.get("kind") in LINE_ITEMS else None,
        **_names(row, by, ("project_id", "api_key_id")),
    }


def _names(row: UsageSum, by: Sequence[str], shown: Sequence[str]) -> dict[str, str | None]:
    """Ungrouped names are null, as OpenAI has it."""
    return {name: row.group[GROUPS[name]] if name in by and name in GROUPS else None for name in shown}
