"""What the predictor knows of each worker alone: numbers by name, of one worker or, as columns, of many."""

from __future__ import annotations

from typing import Generic, NamedTuple

from router.policies.table import Numbers


class WorkerFeatures(NamedTuple, Generic[Numbers]):
    """NaN where nothing is known."""

    num_running: Numbers
    prefill_tokens_per_s: Numbers  # as the worker measures it
    step_s: Numbers
    load_fixed_s: Numbers
    load_each_s: Numbers
    lane_fixed_s: Numbers  # of a byte of KV, as the worker measures it
    lane_each_s: Numbers
    fitted_fixed_s: Numbers  # with what was observed of it
    fitted_each_s: Numbers
    prefill_ratio: Numbers  # measured over expected
    step_ratio: Numbers
    awaits_fit: Numbers  # has received KV and measured no lane itself: the line of all lanes is its prior
    recent_tokens: Numbers
    recent_at: Numbers  # by its pool's clock


class PoolNumbers(NamedTuple, Generic[Numbers]):
    """What the predictor knows of a worker's pool. NaN where nothing is known."""

    prefill_fixed_s: Numbers
    prefill_each_s: Numbers
    step_fixed_s: Numbers
    step_each_s: Numbers
    prefill_tokens_per_s: Numbers
    has_steps: Numbers
    recent_share: Numbers
    recent_at: Numbers
    is_colocated: Numbers
