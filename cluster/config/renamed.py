"""Renamed settings. A file, a flag or `--set` with an old name is refused, and the error gives the new name."""

from __future__ import annotations

from collections.abc import Mapping

from protos.errors import Misconfigured

RENAMED: Mapping[str, str] = {
    "lanes.beat_s": "lanes.heartbeat_s",
    "lanes.expect_s": "lanes.connect_timeout_s",
    "lanes.idle_s": "lanes.idle_timeout_s",
    "ray.silent_s": "ray.response_timeout_s",
    "router.access_log": "router.http.access_log",
    "router.body_timeout_s": "router.http.body_timeout_s",
    "router.canary_every": "router.dispatch.canary_every",
    "router.connect_timeout_s": "router.fleet.connect_timeout_s",
    "router.control_timeout_s": "router.fleet.control_timeout_s",
    "router.cors_origins": "router.http.cors_origins",
    "router.disable_any_whitespace": "router.text.disable_any_whitespace",
    "router.health_period_s": "router.fleet.health_period_s",
    "router.keep_alive_s": "router.http.keep_alive_s",
    "router.max_attempts": "router.dispatch.max_attempts",
    "router.max_backlog": "router.admission.max_backlog",
    "router.max_backlog_s": "router.admission.max_backlog_s",
    "router.max_body_bytes": "router.http.max_body_bytes",
    "router.max_kills": "router.dispatch.max_worker_crashes",
    "router.max_queue_s": "router.admission.max_queue_s",
    "router.max_queued": "router.admission.max_queued",
    "router.num_decisions": "router.decision_history_size",
    "router.retry_pause_s": "router.dispatch.retry_pause_s",
    "router.sibling_s": "router.dispatch.speculative_prefix_ttl_s",
    "router.split_special_tokens": "router.text.split_special_tokens",
    "router.stall_s": "router.http.stall_s",
    "router.successor_s": "router.dispatch.successor_timeout_s",
    "router.ticket_lease_s": "router.dispatch.ticket_lease_s",
    "router.tool_parser": "router.text.tool_parser",
    "supervision.factor": "supervision.backoff_factor",
    "supervision.first_delay_s": "supervision.initial_backoff_s",
    "supervision.max_delay_s": "supervision.max_backoff_s",
    "supervision.max_misses": "supervision.max_failed_checks",
    "supervision.orphan_s": "supervision.orphan_timeout_s",
    "supervision.reset_after_s": "supervision.backoff_reset_s",
    "worker.turn_s": "worker.time_slice_s",
}


def check_renamed(path: str) -> None:
    """Raises Misconfigured for an old path."""
    if new := RENAMED.get(path):
        raise Misconfigured(f"{path} is called {new} now: write {new}", param=path)
