"""The endpoints that need an administrator's key."""

from __future__ import annotations

from functools import partial

from router.admin import capacity_routes, cost_routes, requests, status_routes
from router.admin.capacity_routes import AdapterBody, CapacityBody
from router.faces.endpoint import Endpoint, Face

_row = partial(Endpoint, key="admin")

ADMIN_FACE = Face(
    endpoints=(
        _row("GET", "/admin/status", status_routes.status, "The fleet"),
        _row("GET", "/admin/capacity", capacity_routes.capacity, "The desired fleet and its latest changes"),
        _row(
            "POST", "/admin/capacity", capacity_routes.order,
            "Another number of workers, or another role of a worker", body=CapacityBody,
        ),
        _row("GET", "/admin/capacity/sights", capacity_routes.sights, "What every gateway's clients saw lately"),
        _row("GET", "/admin/kv", status_routes.kv, "Every ticket and lane"),
        _row(
            "POST", "/admin/lanes/probe", status_routes.probe,
            "Moves KV from one worker to another, and compares their answers", query=status_routes.ProbeQuery,
        ),
        _row(
            "POST", "/admin/workers/{worker_id}/drain", status_routes.drain,
            "No new work for a worker: what runs moves on or finishes, then it ends",
        ),
        _row("POST", "/admin/profile", status_routes.profile, "Every worker records its steps from now on"),
        _row("GET", "/admin/profile", status_routes.profile, "The steps recorded so far"),
        _row("DELETE", "/admin/profile", status_routes.profile, "Ends the recording, and returns it"),
        _row("GET", "/admin/requests", requests.recent, "The latest requests", query=requests.RecentQuery),
        _row("GET", "/admin/requests/{name:path}/cache", requests.cache, "Why a prompt was not found in a cache"),
        _row("GET", "/admin/requests/{name:path}", requests.routed, "How a request was routed, why, and how it went"),
        _row("GET", "/admin/shadows", requests.shadows, "What other policies would have done"),
        _row(
            "GET", "/admin/costs", cost_routes.cost_report, "What was used, charged and spent, by group",
            query=cost_routes.CostsQuery,
        ),
        _row(
            "GET", "/v1/organization/usage/completions", cost_routes.usage, "Tokens by buckets of time",
            query=cost_routes.UsageQuery,
        ),
        _row(
            "GET", "/v1/organization/usage/embeddings", cost_routes.vector_usage,
            "Tokens of embeddings by buckets of time", query=cost_routes.VectorQuery,
        ),
        _row(
            "GET", "/v1/organization/costs", cost_routes.charged, "Charges by buckets of time",
            query=cost_routes.ChargesQuery,
        ),
        _row("GET", "/admin/history", requests.history, "The last hour, by periods", query=requests.HistoryQuery),
        _row("GET", "/admin/adapters", capacity_routes.list_adapters, "LoRA adapters, and the workers that have them"),
        _row(
            "POST", "/admin/adapters", capacity_routes.load, "Every worker loads a LoRA adapter", body=AdapterBody
        ),
        _row(
            "DELETE", "/admin/adapters/{name}", capacity_routes.unload,
            "No worker takes requests for a LoRA adapter",
        ),
    )
)  # fmt: skip
