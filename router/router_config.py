"""A router's settings, a class for each room that has some. A value out of range raises Misconfigured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from protos.errors import Misconfigured
from protos.setting import CheckedSettings, setting

ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss", "command_r", "gpt_oss"]
ToolParser = Literal[
    "auto", "command_r", "deepseek_v3", "deepseek_v31", "glm4", "glm45", "gpt_oss", "granite", "hermes", "kimi_k2",
    "llama3_json", "minimax_m2", "mistral", "mistral_args", "olmo3", "phi4_mini", "pythonic", "qwen3_coder",
]  # fmt: skip


def listed_in(setting: str) -> tuple[str, ...]:
    """The parts of a setting between its commas."""
    return tuple(part.strip() for part in setting.split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig(CheckedSettings):
    """Settings that every HTTP face shares."""

    max_body_bytes: int = setting(16 * 2**20, "Largest body of a request that is read.", least=1024, most=2**30)
    body_timeout_s: float = 60.0  # time for a body to arrive after its head
    keep_alive_s: float = setting(15.0, "A silent stream sends a comment this often.", least=0.1, most=3600)
    stall_s: float = 60.0  # a stream whose client reads nothing for this long is ended
    cors_origins: str = setting("", 'Pages that may call the API from a browser: "https://a.example, ..." or "*".')
    hosts: str = setting("", "Further names by which clients reach a gateway without tenants: a.example, ...")
    access_log: bool = setting(True, "Log a line for each request.")

    @property
    def origins(self) -> tuple[str, ...]:
        return listed_in(self.cors_origins)

    @property
    def names(self) -> tuple[str, ...]:
        return listed_in(self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(CheckedSettings):
    """How answers are parsed and prompts are tokenised."""

    chat_template: str = setting("", "File with a Jinja template of conversations, instead of the model's own.")
    tool_parser: ToolParser = setting("auto", "Format of tool calls; auto: as the chat template has it.")
    reasoning_parser: ReasoningParser = setting("auto", "Marks of reasoning; auto: the chat template's.")
    sampling: str = setting(
        "", "Sampling of requests that do not name it, over the model's own: temperature=0.7,top_p=0.95."
    )
    disable_any_whitespace: bool = setting(False, "JSON answers bound to a schema have no white space.")
    pooling: Literal["last", "mean"] = setting("last", "Vector of a prompt: the last hidden state, or the mean of all.")
    split_special_tokens: bool = setting(
        False, "Text of special tokens in a prompt of /v1/completions is text, as always in a chat."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(CheckedSettings):
    """A worker with more work than `max_backlog` or `max_backlog_s` gets no more; requests wait at the gateway."""

    max_queued: int = setting(1024, "Requests that wait at the gateway; more are refused.", least=0, most=10**6)
    max_queue_s: float = setting(
        30.0, "Longest wait at the gateway; twice as long for a request whose turn is near.", least=0, most=3600
    )
    max_backlog: int = 64  # requests at a worker that have not begun
    max_backlog_s: float = 0.5  # prefill work queued at a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig(CheckedSettings):
    """How often and for how long a request is tried.

    `ticket_lease_s` bounds the silence of a gateway, not the time that a prompt waits for its prefill worker.
    """

    max_attempts: int = 3  # most attempts for a request that fails
    max_worker_crashes: int = 2  # a request is rejected after this many workers died with it, no token in between
    retry_pause_s: float = 0.1  # first pause before another attempt; later ones double
    successor_timeout_s: float = setting(
        600.0, "Longest wait of a running answer for a worker that is starting.", least=0, most=86400
    )
    ticket_lease_s: float = 30.0  # a decode worker frees blocks whose ticket is not renewed for this long
    speculative_prefix_ttl_s: float = 3.0  # a prompt just routed counts as cached on its workers for this long
    canary_every: int = setting(
        0, "One in this many greedy requests runs again on one worker and is compared; 0: none.", least=0, most=10**9
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(CheckedSettings):
    """Calls to workers."""

    connect_timeout_s: float = 10.0  # timeout for a connection to a worker
    control_timeout_s: float = 10.0  # timeout for a worker's answer to a call without tokens
    health_period_s: float = 1.0  # time between two health checks of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig(CheckedSettings):
    """Traces of requests for an OpenTelemetry collector. Their variables are OpenTelemetry's own."""

    endpoint: str = setting(
        "",
        'Collector of traces, OTLP over HTTP: "http://collector:4318"; empty: none.',
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    headers: str = setting(
        "", 'Headers for the collector: "name=value, ...".', variable="OTEL_EXPORTER_OTLP_HEADERS", repr=False
    )
    service_name: str = setting("baton", "Name of this service in traces.", variable="OTEL_SERVICE_NAME")
    sample: float = setting(1.0, "Share of the requests that are traced whose caller does not decide.", least=0, most=1)

    def __post_init__(self) -> None:
        CheckedSettings.__post_init__(self)
        _, _ = self.traces_url, self.header_values

    @property
    def traces_url(self) -> str:
        """The endpoint with the path of traces; "" without one. Raises Misconfigured."""
        if not self.endpoint:
            return ""
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise Misconfigured(
                f"router.telemetry.endpoint is {self.endpoint!r}: give the URL of a collector of OTLP over HTTP, as "
                "http://collector:4318",
                param="router.telemetry.endpoint",
            )
        return f"{self.endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"

    @property
    def header_values(self) -> Mapping[str, str]:
        """Raises Misconfigured."""
        pairs = [part.strip().partition("=") for part in self.headers.split(",") if part.strip()]
        for name, equals, _ in pairs:
            if not name or not equals:
                raise Misconfigured(
                    f"router.telemetry.headers has {name!r} without a value: write name=value, name=value",
                    param="router.telemetry.headers",
                )
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig(CheckedSettings):
    """The database of requests, for usage and costs."""

    path: str = setting("", "Database of requests (SQLite), shared by gateways of this host; empty: no ledger.")
    prices: str = setting("", "File of prices (docs/economics.md); empty: everything is free.")
    keep_days: int = setting(
        400,
        "Days that single requests are kept; their sums by hour are kept for ever. 0: for ever, too.",
        least=0,
        most=36_500,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(CheckedSettings):
    """Files and batches."""

    folder: str = setting(
        "",
        "Folder of files and batches of this host, or s3://BUCKET/PREFIX beside a database; empty: of the user "
        "(docs/api.md).",
    )
    max_file_bytes: int = 200 * 2**20  # largest file of a batch's requests
    max_tenant_bytes: int = setting(100 * 2**30, "Files of batches that are stored for a tenant.", least=0, most=2**60)
    max_lines: int = 50_000  # most requests of a batch
    max_running: int = 256  # requests of batches that run at a time in a gateway process
    slowdown: float = setting(
        1.08, "How many times longer steps of people's requests may become by batches beside them.", least=1, most=100
    )
    lease_s: float = 10.0  # another gateway process continues with a batch whose owner is silent for this long

    @property
    def is_in_bucket(self) -> bool:
        return self.folder.startswith("s3://")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(CheckedSettings):
    """Tokenizer, chat template and generation defaults are read from `model_path`, a checkpoint folder or GGUF file.

    Conditional disaggregation: the decode worker computes a prompt itself whose uncached part is shorter than both
    `local_prefill_tokens` and `local_prefill_share` of the prompt.
    """

    model_path: Path
    model_name: str
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port of HTTP; 0: any free one, for gRPC too.", least=0, most=65535)
    grpc_port: int = setting(8001, "Port of gRPC, by default the next one; 0: any free one.", least=0, most=65535)
    tenants: str = setting("", "File of tenants and hashes of their keys (docs/security.md); empty: no keys needed.")
    model_aliases: str = setting(
        "", 'Further names that requests may use for the model: "claude-*, gpt-4o"; * is any text.'
    )
    policy: str = setting("slo", "How requests are routed (docs/routing.md).")
    shadow_policy: str = setting("", "More policies (comma-separated) that score requests without deciding.")
    ttft_ms: float = setting(1000.0, "Objective of the policy slo for a first token.", least=1, most=10**7)
    tpot_ms: float = setting(50.0, "Objective of the policy slo for the time between tokens.", least=0.1, most=10**6)
    database: str = setting(
        "",
        "Postgres of ledger, files and batches, shared by hosts: postgresql://...; empty: SQLite.",
        variable="BATON_DATABASE",
        repr=False,
    )
    local_prefill_tokens: int = setting(
        64, "An uncached remainder shorter than this stays on the decode worker.", least=0, most=2**20
    )
    local_prefill_share: float = 0.7  # an uncached remainder must also be a smaller share of the prompt to stay there
    decision_history_size: int = 1024  # decisions kept for `baton why`
    http: HttpConfig = field(default_factory=HttpConfig)
    text: TextConfig = field(default_factory=TextConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def __post_init__(self) -> None:
        CheckedSettings.__post_init__(self)
        if self.database and self.ledger.path:
            raise Misconfigured(
                f"router.ledger.path = {self.ledger.path!r} beside router.database: the ledger is in one of them, give "
                "only that",
                param="router.ledger.path",
            )
        if self.batch.is_in_bucket and not self.database:
            raise Misconfigured(
                f"router.batch.folder = {self.batch.folder!r} without router.database: a bucket has the contents of "
                "files, and their rows are in Postgres; set both, or give a folder of this host",
                param="router.batch.folder",
            )
        if self.ledger.prices and not self.has_ledger:
            raise Misconfigured(
                f"router.ledger.prices = {self.ledger.prices!r} without a ledger: set router.ledger.path, or "
                "router.database, too",
                param="router.ledger.path",
            )

    @property
    def has_ledger(self) -> bool:
        return bool(self.database or self.ledger.path)
