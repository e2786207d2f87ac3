"""Device seconds of a request, estimated from the speeds that its workers report when it ends.

    prefill   uncached prompt tokens / tokens that its worker reads in a second       * devices of the worker
    decode    answer tokens * time of a step / sequences that its worker runs at once * devices of the worker

The sum over all requests is at most the time that devices computed; the rest of the time that there were devices is
idle, and is shown as such. A step that computes prompts beside answers counts for the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.jobs import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """Device seconds that a worker spends on a prompt token, and on a token of an answer."""

    prompt_token_s: float = 0.0
    answer_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeconds:
    """Of one request: spent, and spared by prefix caches and by drafts."""

    prefill_s: float
    decode_s: float
    cache_saved_s: float
    speculation_saved_s: float


def rate_of(worker: WorkerView) -> WorkerRate:
    """0 for what the worker has not measured yet."""
    load, devices = worker.load, worker.info.layout.tp if worker.info is not None else 1
    speed = load.prefill_tokens_per_s
    return WorkerRate(
        prompt_token_s=devices / speed if speed > 0 else 0.0,
        answer_token_s=devices * load.decode_step_s / max(1, load.num_running),
    )


def num_devices(workers: Sequence[WorkerView]) -> int:
    """Devices of the workers that serve or drain."""
    return sum(one.info.layout.tp for one in workers if one.info is not None and one.state in ("ready", "draining"))
