"""GET /admin/costs, and OpenAI's pages of usage and costs below /v1/organization, for administrators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, NotFound
from router.database.database import Database
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Query, second
from router.observe.ledger.ledger_report import GROUPS, costs
from router.observe.ledger.organization import (
    MAX_COST_DAYS,
    USAGE_GROUPS,
    VECTOR_GROUPS,
    WIDTHS,
    PageQuery,
    costs_page,
    usage_page,
    vector_usage_page,
)
from router.observe.ledger.request_ledger import RequestLedger

DEFAULT_SINCE_S = 86_400
_GROUPED = f"({'|'.join(GROUPS)})"


class CostsQuery(Query):
    since: int | SkipJsonSchema[None] = second(None)
    until: int | SkipJsonSchema[None] = second(None)
    by: str = Field(
        default="tenant", pattern=f"^({_GROUPED}(,{_GROUPED})*)?$", description=f"a list of {', '.join(GROUPS)}"
    )


class BucketsQuery(Query):
    """Buckets of time. `page`: the second at which the page begins."""

    start_time: int = second(...)
    end_time: int | SkipJsonSchema[None] = second(None)
    page: int | SkipJsonSchema[None] = second(None)
    bucket_width: Literal["1m", "1h", "1d"] = Field(default="1d", description="1m, 1h or 1d")
    limit: int | SkipJsonSchema[None] = Field(
        default=None, ge=1, json_schema_extra={"maximum": 31}, description="a number of buckets"
    )

    def buckets(self, by: Sequence[str], *, most: int | None = None) -> PageQuery:
        """Raises InvalidRequest for more buckets than a page has."""
        width_s, count, largest = WIDTHS[self.bucket_width]
        limit, most = self.limit or count, most or largest
        if limit > most:
            problem = f"'limit' is {limit}: it must be a number from 1 to {most} for buckets of {self.bucket_width}"
            raise InvalidRequest(problem, param="limit")
        start_s = (self.start_time if self.page is None else self.page) // width_s * width_s
        end_s = (int(time.time()) // width_s + 1) * width_s if self.end_time is None else self.end_time
        by = tuple(dict.fromkeys(by))
        return PageQuery(start_s=start_s, end_s=max(start_s, end_s), width_s=width_s, count=limit, by=by)


class UsageQuery(BucketsQuery):
    group_by: list[Literal["project_id", "api_key_id", "model", "batch", "user_id", "service_tier"]] = Field(
        default=[], description="names of " + ", ".join(USAGE_GROUPS)
    )


class VectorQuery(BucketsQuery):
    group_by: list[Literal["project_id", "user_id", "api_key_id", "model"]] = Field(
        default=[], description="names of " + ", ".join(VECTOR_GROUPS)
    )


class ChargesQuery(BucketsQuery):
    group_by: list[Literal["project_id", "api_key_id", "line_item"]] = Field(
        default=[], description="names of project_id, api_key_id and line_item"
    )


def _ledger(gateway: Gateway) -> RequestLedger:
    """Raises NotFound."""
    if gateway.ledger is None:
        raise NotFound("this gateway keeps no ledger: start it with --set router.ledger.path=FILE")
    return gateway.ledger


async def cost_report(gateway: Gateway, _: Request, asked: CostsQuery) -> Response:
    ledger = _ledger(gateway)
    until_s = int(time.time()) + 1 if asked.until is None else asked.until
    since_s = max(0, until_s - DEFAULT_SINCE_S) if asked.since is None else asked.since
    by = [name for name in asked.by.split(",") if name]
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


async def usage(gateway: Gateway, _: Request, asked: UsageQuery) -> Response:
    return await _page(gateway, usage_page, asked.buckets(asked.group_by))


async def vector_usage(gateway: Gateway, _: Request, asked: VectorQuery) -> Response:
    return await _page(gateway, vector_usage_page, asked.buckets(asked.group_by))


async def charged(gateway: Gateway, _: Request, asked: ChargesQuery) -> Response:
    return await _page(gateway, costs_page, asked.buckets(asked.group_by, most=MAX_COST_DAYS))


async def _page(gateway: Gateway, page: Callable[[Database, PageQuery], dict[str, Any]], query: PageQuery) -> Response:
    return json_response(await asyncio.to_thread(page, _ledger(gateway).store.database, query))
