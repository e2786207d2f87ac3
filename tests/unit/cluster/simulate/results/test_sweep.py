"""The clusters that a sweep tries, their order, and its report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cluster.bench.bench_report import Objective, RequestRecord
from cluster.simulate.results.targets import PercentileTarget, targets_of
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.asking import SMALL, answer, call


def record(ttft_s: float, *, error: str = "", num_output: int = 3) -> RequestRecord:
    arrivals = (ttft_s, ttft_s + 0.2) if num_output > 1 else (ttft_s,)
    return RequestRecord(index=0, sent_s=0.0, arrivals_s=arrivals, num_output=num_output, error=error)


def test_a_percentile_includes_failed_and_unsent_requests() -> None:
    target = PercentileTarget.parse("ttft p90 < 2 s")
    nine = [record(0.1 * k) for k in range(1, 10)]
    assert target.reached([*nine, record(3.0)], 0).is_met
    assert not target.reached([*nine, record(3.0)], 1).is_met, "one was never asked"
    failed = target.reached([*nine[:8], record(0.1, error="no_workers"), record(0.2, error="no_workers")], 0)
    assert not failed.is_met
    assert failed.value_s == math.inf
    assert failed.figure == "never"


def test_answers_of_one_token_have_no_time_per_token_to_miss() -> None:
    target = PercentileTarget.parse("tpot p50 50ms")
    assert target.reached([record(0.1, num_output=1)], 0).is_met
    assert not target.reached([record(0.1, num_output=1), record(0.1)], 0).is_met


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft p90", "ttft p0 < 1 s", "ttft p100 < 1 s", "itl p90 < 1 s", "ttft p90 < 0 s"]
)
def test_a_meaningless_target_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"'ttft p90 < 2 s'"):
        PercentileTarget.parse(text)


def test_a_sweep_without_a_target_is_refused() -> None:
    with pytest.raises(Misconfigured, match="targets"):
        targets_of(Objective(), 0.95, ())


def test_clusters_are_ranked_by_hourly_cost(tmp_path: Path) -> None:
    """A cluster that took less time for the load was cheaper than a smaller one."""
    file = tmp_path / "sweep.json"
    told = answer(*SMALL, "cluster.max_gpus=2", "objectives.targets=['ttft p90 < 90 s']", "--json", str(file))
    swept = json.loads(file.read_text())
    prices = [run["usd_per_hour"] for run in swept["runs"]]
    assert prices == sorted(prices)
    assert prices[-1] == 2 * prices[0]
    assert swept["cheapest"] == swept["front"][0]
    assert (swept["cheapest"]["prefill"], swept["cheapest"]["decode"]) == (0, 1)
    assert "the cheapest that reaches TTFT p90 < 90000 ms: 1 colocated tp1 slo, USD" in told
    assert {"prefill": 1, "decode": 1, "tp": 1, "policy": "slo"} in [run["cluster"] for run in swept["runs"]]


def test_an_unreachable_target_names_its_bottleneck() -> None:
    result = call(*SMALL, "workload.rate=99", "cluster.decode=1:2", "objectives.targets=['tpot p50 < 1 ms']")
    assert result.exit_code == 1
    assert "its TPOT p50 is " in result.stdout
