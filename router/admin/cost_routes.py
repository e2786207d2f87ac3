"""GET /admin/costs, and OpenAI's pages of usage and costs below /v1/organization, for administrators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import NotFound
from router.admin.door import SECOND, AdminRoutes, seconds_of
from router.endpoint import Schema, query_parameter
from router.gateway import Gateway
from router.http.error_responses import json_response
from router.ledger.ledger_report import GROUPS, costs
from router.ledger.organization import (
    COST_GROUPS,
    MAX_COST_DAYS,
    USAGE_GROUPS,
    VECTOR_GROUPS,
    WIDTHS,
    costs_page,
    page_query,
    usage_page,
    vector_usage_page,
)
from router.ledger.request_ledger import RequestLedger

DEFAULT_SINCE_S = 86_400
ORGANIZATION = "/v1/organization"
"""Where OpenAI's API has usage and costs."""
_LEAST_MAX_BUCKETS = min(largest for _, _, largest in WIDTHS.values())
_GROUPED = f"({'|'.join(GROUPS)})"
_COSTS = (
    query_parameter("since", SECOND),
    query_parameter("until", SECOND),
    query_parameter("by", {"type": "string", "pattern": f"^({_GROUPED}(,{_GROUPED})*)?$"}),
)


def _buckets(groups: Sequence[str], *, most: int = _LEAST_MAX_BUCKETS) -> Sequence[Schema]:
    return (
        query_parameter("start_time", SECOND, required=True),
        query_parameter("end_time", SECOND),
        query_parameter("page", SECOND),
        query_parameter("bucket_width", {"type": "string", "enum": list(WIDTHS)}),
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        query_parameter("group_by", {"type": "array", "items": {"type": "string", "enum": list(groups)}}),
    )


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    def ledger() -> RequestLedger:
        if gateway.ledger is None:
            raise NotFound("this gateway keeps no ledger: start it with --set router.ledger.path=FILE")
        return gateway.ledger

    @admin.route("/costs", "What was used, charged and spent, by group", query=_COSTS)
    async def cost_report(request: Request) -> Response:
        kept = ledger()
        until_s = seconds_of(request, "until", int(time.time()) + 1)
        since_s = seconds_of(request, "since", max(0, until_s - DEFAULT_SINCE_S))
        by = [name for name in request.query_params.get("by", "tenant").split(",") if name]
        report = await asyncio.to_thread(
            costs, kept.store.database, kept.prices, since_s=since_s, until_s=until_s, by=by
        )
        rows: list[dict[str, Any]] = [
            asdict(row) | {"cost_usd": report.cost_usd(row)} | dict(report.saved_usd(row)) for row in report.rows
        ]
        return json_response(
            {
                "since": report.since_s,
                "until": report.until_s,
                "rows_from": report.rows_from_s,
                "by": by,
                "rows": rows,
                "device_hour_usd": report.device_hour,
                "fleet_device_s": report.fleet_device_s,
                "fleet_usd": report.fleet_usd,
                "idle_usd": report.idle_usd,
                "worker_prompt_tokens": report.worker_prompt_tokens,
                "worker_output_tokens": report.worker_output_tokens,
                "unrecorded_output_tokens": report.unrecorded_output_tokens,
                "budgets": [asdict(one) for one in gateway.access.budgets.states()],
            }
        )

    @admin.route("/usage/completions", "Tokens by buckets of time", prefix=ORGANIZATION, query=_buckets(USAGE_GROUPS))
    async def usage(request: Request) -> Response:
        asked = page_query(request, groups=USAGE_GROUPS)
        return json_response(await asyncio.to_thread(usage_page, ledger().store.database, asked))

    @admin.route(
        "/usage/embeddings",
        "Tokens of embeddings by buckets of time",
        prefix=ORGANIZATION,
        query=_buckets(VECTOR_GROUPS),
    )
    async def vector_usage(request: Request) -> Response:
        asked = page_query(request, groups=VECTOR_GROUPS)
        return json_response(await asyncio.to_thread(vector_usage_page, ledger().store.database, asked))

    @admin.route(
        "/costs", "Charges by buckets of time", prefix=ORGANIZATION, query=_buckets(COST_GROUPS, most=MAX_COST_DAYS)
    )
    async def charged(request: Request) -> Response:
        asked = page_query(request, groups=COST_GROUPS, most=MAX_COST_DAYS)
        return json_response(await asyncio.to_thread(costs_page, ledger().store.database, asked))
