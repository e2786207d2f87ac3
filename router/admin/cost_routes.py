"""GET /admin/costs, and OpenAI's pages of usage and costs below /v1/organization, for administrators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import NotFound
from router.admin.requests import SECOND, seconds_of
from router.database.database import Database
from router.faces.endpoint import Schema, query_parameter
from router.gateway import Gateway
from router.http.api import json_response
from router.observe.ledger.ledger_report import GROUPS, costs
from router.observe.ledger.organization import (
    COST_GROUPS,
    MAX_COST_DAYS,
    USAGE_GROUPS,
    VECTOR_GROUPS,
    WIDTHS,
    PageQuery,
    costs_page,
    page_query,
    usage_page,
    vector_usage_page,
)
from router.observe.ledger.request_ledger import RequestLedger

DEFAULT_SINCE_S = 86_400
_LEAST_MAX_BUCKETS = min(largest for _, _, largest in WIDTHS.values())
_GROUPED = f"({'|'.join(GROUPS)})"
COSTS_QUERY = (
    query_parameter("since", SECOND),
    query_parameter("until", SECOND),
    query_parameter("by", {"type": "string", "pattern": f"^({_GROUPED}(,{_GROUPED})*)?$"}),
)


def buckets_query(groups: Sequence[str], *, most: int = _LEAST_MAX_BUCKETS) -> Sequence[Schema]:
    return (
        query_parameter("start_time", SECOND, required=True),
        query_parameter("end_time", SECOND),
        query_parameter("page", SECOND),
        query_parameter("bucket_width", {"type": "string", "enum": list(WIDTHS)}),
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        query_parameter("group_by", {"type": "array", "items": {"type": "string", "enum": list(groups)}}),
    )


def _ledger(gateway: Gateway) -> RequestLedger:
    """Raises NotFound."""
    if gateway.ledger is None:
        raise NotFound("this gateway keeps no ledger: start it with --set router.ledger.path=FILE")
    return gateway.ledger


async def cost_report(gateway: Gateway, request: Request) -> Response:
    ledger = _ledger(gateway)
    until_s = seconds_of(request, "until", int(time.time()) + 1)
    since_s = seconds_of(request, "since", max(0, until_s - DEFAULT_SINCE_S))
    by = [name for name in request.query_params.get("by", "tenant").split(",") if name]
    report = await asyncio.to_thread(
        costs, ledger.store.database, ledger.prices, since_s=since_s, until_s=until_s, by=by
    )
    rows: list[dict[str, Any]] = [
        asdict(row) | {"cost_usd": report.cost_usd(row)} | dict(report.saved_usd(row)) for row in report.rows
    ]
    return json_response(
        asdict(report)
        | {
            "by": by,
            "rows": rows,
            "unrecorded_output_tokens": report.unrecorded_output_tokens,
            "budgets": [asdict(budget) for budget in gateway.access.budgets.states()],
        }
    )


async def usage(gateway: Gateway, request: Request) -> Response:
    return await _page(gateway, usage_page, page_query(request, groups=USAGE_GROUPS))


async def vector_usage(gateway: Gateway, request: Request) -> Response:
    return await _page(gateway, vector_usage_page, page_query(request, groups=VECTOR_GROUPS))


async def charged(gateway: Gateway, request: Request) -> Response:
    return await _page(gateway, costs_page, page_query(request, groups=COST_GROUPS, most=MAX_COST_DAYS))


async def _page(gateway: Gateway, page: Callable[[Database, PageQuery], dict[str, Any]], query: PageQuery) -> Response:
    return json_response(await asyncio.to_thread(page, _ledger(gateway).store.database, query))
