"""The replies of the ledger's routes, as the API's description shows them."""

from __future__ import annotations

from typing import Literal

from router.openai.responses import Reply


class CostRow(Reply):
    """One group. Times are seconds since 1970, `*_device_s` seconds of a device."""

    start_s: int
    end_s: int
    group: dict[str, str]
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    prefill_device_s: float
    decode_device_s: float
    charged_usd: float
    accepted_tokens: int
    cache_saved_device_s: float
    speculation_saved_device_s: float
    drafted_tokens: int
    prefill_kv_byte_s: float
    decode_kv_byte_s: float
    cost_usd: float
    cache_saved_usd: float
    speculation_saved_usd: float


class BudgetReply(Reply):
    """A tenant's budget in its present month or day, which ends at `until_s`."""

    tenant: str
    period: Literal["month", "day"]
    until_s: float
    spent_usd: float
    soft_usd: float | None
    hard_usd: float | None


class CostsReply(Reply):
    """`fleet_usd`: what all devices cost in this time; `idle_usd`: of that, what no request used. `worker_*_tokens`:
    what workers computed, by their own counts; `unrecorded_output_tokens`: of that, what is in no row. `rows_from`:
    single requests are kept from then on (0: all are); `since` and `until` before it are widened to whole hours."""

    since: int
    until: int
    rows_from: int
    by: list[str]
    rows: list[CostRow]
    device_hour_usd: float
    fleet_device_s: float
    fleet_usd: float
    idle_usd: float
    worker_prompt_tokens: int
    worker_output_tokens: int
    unrecorded_output_tokens: int
    budgets: list[BudgetReply]


class UsageResult(Reply):
    object: Literal["organization.usage.completions.result"]
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    input_audio_tokens: int
    output_tokens: int
    output_audio_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: str | None
    api_key_id: str | None
    model: str | None
    batch: bool | None
    service_tier: str | None


class VectorUsageResult(Reply):
    object: Literal["organization.usage.embeddings.result"]
    input_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: str | None
    api_key_id: str | None
    model: str | None


class Money(Reply):
    value: float
    currency: Literal["usd"]


class ChargeResult(Reply):
    object: Literal["organization.costs.result"]
    amount: Money
    line_item: str | None
    quantity: float | None
    project_id: str | None
    api_key_id: str | None


class UsageBucket(Reply):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageResult]


class VectorUsageBucket(Reply):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[VectorUsageResult]


class ChargeBucket(Reply):
    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[ChargeResult]


class UsagePageReply(Reply):
    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class VectorUsagePageReply(Reply):
    object: Literal["page"]
    data: list[VectorUsageBucket]
    has_more: bool
    next_page: str | None


class ChargePageReply(Reply):
    object: Literal["page"]
    data: list[ChargeBucket]
    has_more: bool
    next_page: str | None
