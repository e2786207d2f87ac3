"""What a router is told at its start. Bad values raise Misconfigured, naming the value, the range and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`model_path` is the checkpoint folder (tokenizer, chat template and generation defaults are read from it).

    Conditional disaggregation: a prompt whose uncached part on the chosen decode worker is shorter than
    `local_prefill_tokens`, and than `local_prefill_share` of the prompt, is read by the decode worker itself.
    """

    model_path: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    policy: str = "prefix_aware"
    local_prefill_tokens: int = 64
    local_prefill_share: float = 0.7
    max_attempts: int = 3
    ticket_lease_s: float = 30.0
    connect_timeout_s: float = 10.0
    health_period_s: float = 1.0
    max_body_bytes: int = 16 * 2**20
    max_queue_s: float = 30.0
