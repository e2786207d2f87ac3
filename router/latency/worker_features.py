"""The predictor's numbers about single workers and about pools, for one worker or, as columns, for many."""

from __future__ import annotations

from typing import Generic, NamedTuple

from router.policies.candidate_columns import Numbers


class WorkerFeatures(NamedTuple, Generic[Numbers]):
    """The predictor's numbers about one worker. Unknown numbers are NaN."""

    num_running: Numbers
    prefill_tokens_per_s: Numbers  # measured by the worker
    step_s: Numbers
    load_fixed_s: Numbers
    load_each_s: Numbers
    lane_fixed_s: Numbers  # for a byte of KV, measured by the worker
    lane_each_s: Numbers
    fitted_fixed_s: Numbers  # with the router's observations
    fitted_each_s: Numbers
    prefill_ratio: Numbers  # measured over expected
    step_ratio: Numbers
    awaits_fit: Numbers  # the worker has received KV and has not measured a lane: the line of all lanes is its prior
    recent_tokens: Numbers
    recent_at: Numbers  # on its pool's clock


class PoolNumbers(NamedTuple, Generic[Numbers]):
    """The predictor's numbers about a worker's pool. Unknown numbers are NaN."""

    prefill_fixed_s: Numbers
    prefill_each_s: Numbers
    step_fixed_s: Numbers
    step_each_s: Numbers
    prefill_tokens_per_s: Numbers
    has_steps: Numbers
    recent_share: Numbers
    recent_at: Numbers
    is_colocated: Numbers
