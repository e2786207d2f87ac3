"""Values that are written into the ledger."""

from __future__ import annotations

from protos.codec import Value


class LedgerRow(Value, frozen=True, kw_only=True):
    """An ended request. `at_s`: its arrival, seconds since 1970. `key_id`: the beginning of its key's hash.
    `outcome`: ok or an error's code. `reasoning_tokens` and `accepted_tokens` are among `output_tokens`. Device
    seconds and KV byte seconds are estimates (`router.observe.ledger.costing`). `price`: date and model of the entry
    that it is charged by; `charged_*_usd` are 0 in rows of versions before 2026-11."""

    request_id: str
    at_s: float
    seconds: float
    tenant: str
    key_id: str
    model: str
    endpoint: str
    outcome: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    prefill_device_s: float
    decode_device_s: float
    charged_usd: float
    batch: int = 0
    accepted_tokens: int = 0
    cache_saved_device_s: float = 0.0
    speculation_saved_device_s: float = 0.0
    drafted_tokens: int = 0
    prefill_kv_byte_s: float = 0.0
    decode_kv_byte_s: float = 0.0
    price: str = ""
    charged_input_usd: float = 0.0
    charged_cached_usd: float = 0.0
    charged_output_usd: float = 0.0


class FleetMinute(Value, frozen=True, kw_only=True):
    """Devices of a model's fleet in a minute (since 1970)."""

    minute: int
    devices: int
    model: str = ""


class WorkerCount(Value, frozen=True, kw_only=True):
    """Tokens that a worker has computed from its start until a minute (since 1970). `before`: its count when a gateway
    met it."""

    worker: str
    incarnation: int
    minute: int
    prompt_tokens: int
    output_tokens: int
    before: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class OpenRequest(Value, frozen=True, kw_only=True):
    """A running request, with what its client has been sent so far."""

    row: LedgerRow


Written = LedgerRow | FleetMinute | WorkerCount | OpenRequest
