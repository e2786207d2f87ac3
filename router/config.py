"""What a router is told at its start. Bad values raise Misconfigured, naming the value, the range and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protos.errors import Misconfigured

TOP = ("port", "grpc_port")  # settings that are written outside [router]
# Least and greatest value of every number, both allowed.
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "grpc_port": (0, 65535),
    "local_prefill_tokens": (0, 2**20),
    "local_prefill_share": (0.0, 1.0),
    "max_attempts": (1, 100),
    "max_kills": (1, 100),
    "ticket_lease_s": (0.1, 3600.0),
    "connect_timeout_s": (0.01, 600.0),
    "control_timeout_s": (0.01, 600.0),
    "health_period_s": (0.01, 600.0),
    "max_body_bytes": (1024, 2**30),
    "body_timeout_s": (0.1, 3600.0),
    "keep_alive_s": (0.1, 3600.0),
    "stall_s": (0.01, 86400.0),
    "max_queue_s": (0.0, 3600.0),
    "successor_s": (0.0, 86400.0),
    "retry_pause_s": (0.001, 60.0),
    "sibling_s": (0.0, 60.0),
    "num_decisions": (1, 10**6),
    "canary_every": (0, 10**9),
    "ttft_ms": (1.0, 10**7),
    "tpot_ms": (0.1, 10**6),
    "max_queued": (0, 10**6),
    "max_backlog": (1, 10**6),
    "max_backlog_s": (0.001, 600.0),
}

TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`model_path` is the checkpoint folder (tokenizer, chat template and generation defaults are read from it).

    Conditional disaggregation: a prompt whose uncached part on the chosen decode worker is shorter than
    `local_prefill_tokens`, and than `local_prefill_share` of the prompt, is read by the decode worker itself.

    `ticket_lease_s` is how long a decode worker keeps blocks for a request that nobody renews and no KV comes for: it
    bounds silence, not the time that a prompt waits for its prefill worker.

    A request that was on `max_kills` workers when they died, without a token in between, is not tried again.

    A request that met a failure is tried `max_attempts` times in all, after pauses that start at `retry_pause_s` and
    double; while no worker can take it, it waits for at most `max_queue_s`. An answer that has begun waits for at most
    `successor_s` while the supervisor is starting a worker that could go on with it.

    A prompt just routed counts as cached on its workers for `sibling_s`. The last `num_decisions` requests' decisions
    can be asked for.

    One in `canary_every` greedy requests is run again on one worker alone, afterwards, and compared; 0: none.

    `shadow_policy` (one, or several with commas between) scores every request as well, without acting.

    The policy `slo` tries to keep the time to a first token under `ttft_ms`, and that between tokens under `tpot_ms`.

    A worker that has prompts to read for more than `max_backlog_s`, or `max_backlog` requests that have not begun, is
    given no more: up to `max_queued` requests wait at the gateway, in fair order, and the others are refused.
    A body of more than `max_body_bytes`, or one that is not whole `body_timeout_s` after its head, is not read.
    A stream that has nothing to say for `keep_alive_s` sends a comment. One whose client takes nothing for `stall_s` is
    ended, with its sequences. Pages of `cors_origins` ("https://a.example,
    https://b.example", or "*") may ask from a browser.

    Calls of tools are read from answers as `tool_parser` says: "hermes", "llama3_json", "mistral", or "auto", as the
    model's chat template shows them. With `disable_any_whitespace` JSON whose form a request binds has none.

    With `split_special_tokens` the text of special tokens in a prompt of /v1/completions is text, as it always is in
    the messages of a chat, where a request does not say otherwise.

    With `access_log` every request has a line in the log.

    `tenants` is a file of tenants and the hashes of their keys (docs/operating.md); empty: no keys are asked for.
    """

    model_path: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    policy: str = "slo"
    shadow_policy: str = ""
    local_prefill_tokens: int = 64
    local_prefill_share: float = 0.7
    max_attempts: int = 3
    max_kills: int = 2
    ticket_lease_s: float = 30.0
    connect_timeout_s: float = 10.0
    control_timeout_s: float = 10.0
    health_period_s: float = 1.0
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    cors_origins: str = ""
    max_queue_s: float = 30.0
    successor_s: float = 600.0
    retry_pause_s: float = 0.1
    sibling_s: float = 3.0
    num_decisions: int = 1024
    canary_every: int = 0
    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    max_queued: int = 1024
    max_backlog: int = 64
    max_backlog_s: float = 0.5
    access_log: bool = True
    tenants: str = ""
    tool_parser: str = "auto"
    disable_any_whitespace: bool = False
    split_special_tokens: bool = False

    def __post_init__(self) -> None:
        if self.tool_parser not in TOOL_PARSERS:
            raise Misconfigured(
                f"router.tool_parser = {self.tool_parser!r}: choose one of {', '.join(TOOL_PARSERS)}",
                param="tool_parser",
            )
        for name, (least, greatest) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= greatest:
                where = "" if name in TOP else "router."
                raise Misconfigured(f"{where}{name} = {value}: give a number from {least} to {greatest}", param=name)
