"""The length of a leap: how many of the next steps are alike, so that one batch can take them all.

In each of them every running sequence decodes one token: no answer ends or could end, no request waits, and no block is
taken or filled except by the last step. So the worker publishes only tokens before the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from protos.codec import Value
from workers.batch import Batch
from workers.engine.speed import EngineSpeed
from workers.scheduling.request import Request
from workers.scheduling.scheduler import Scheduler


class LeapLimits(Value, frozen=True, kw_only=True):
    """`has_eos`: some tokens end an answer. `can_grow`: there is a free block for every sequence, and taking it has no
    other effect. `windows` give pages back."""

    block_size: int
    max_len: int
    has_eos: bool
    can_grow: bool
    windows: tuple[int, ...]

    @classmethod
    def of(cls, scheduler: Scheduler) -> LeapLimits:
        return cls(
            block_size=scheduler.pool.block_size,
            max_len=scheduler.max_len,
            has_eos=bool(scheduler.config.eos_ids),
            can_grow=scheduler.pool.can_spare(scheduler.num_running * scheduler.pool.windows.num_groups),
            windows=tuple([window for window in scheduler.pool.windows.windows if window is not None]),
        )


def num_uniform(scheduler: Scheduler, last: Batch, num_in_flight: int) -> int:
    """Returns the number of uniform steps, with the one that takes or fills a block. `num_in_flight` of them are
    launched. They continue the `last` batch, which must have sampled exactly the running sequences."""
    running = scheduler.running
    if num_in_flight > 1 or not running or scheduler.num_waiting or len(scheduler.onloads):
        return 0
    if len(last.rows) != len(running) or scheduler.num_leaving_blocks:
        return 0
    limits = LeapLimits.of(scheduler)
    least = limits.max_len
    for request, row in zip(running, last.rows, strict=True):
        if row.sample is None or row.request_id != request.request_id:
            return 0
        least = min(least, _num_uniform(request, limits, num_in_flight))
        if least <= 0:
            return 0
    return least


def _num_uniform(request: Request, limits: LeapLimits, num_in_flight: int) -> int:
    num_output, sampling, size = len(request.output_ids), request.sampling, limits.block_size
    num_tokens, num_due, num_computed = len(request.prompt_ids) + num_output, request.num_due, request.num_computed
    num_planned = request.num_planned
    decodes = num_tokens + num_due - num_planned == 1 and num_due == num_in_flight and num_output > request.num_given
    if not decodes or num_planned - num_computed != num_in_flight:  # the latter: a remainder after a preemption
        return 0
    may_stop = limits.has_eos and not sampling.ignore_eos
    if may_stop or num_output < sampling.min_tokens or not request.text_only:
        return 0
    ahead = max(num_in_flight, 1)
    to_slide = [size - (num_computed + 1 - window) % size for window in limits.windows if num_computed + size >= window]
    return min(
        *to_slide,
        sampling.max_tokens - num_output - ahead,
        limits.max_len - num_tokens - ahead,
        len(request.block_ids) * size + 1 - num_tokens - num_due + limits.can_grow,
        (request.num_sealed + 1) * size - 1 - num_computed + limits.can_grow,
    )


def num_steady(speed: EngineSpeed, steps_s: Sequence[float]) -> int:
    """Returns the number of steps until the published time of a step changes."""
    speed = copy(speed)
    published_s = speed.decode_step_s
    for number, step_s in enumerate(steps_s, 1):
        speed.observe_decode(step_s)
        if speed.decode_step_s != published_s:
            return number
    return len(steps_s)
