"""The definitions, by tables: what a record means and what a run of records adds up to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.bench.bench_report import Objective, RequestRecord, make_report, percentile, spread


def record(*arrivals_s: float, sent_s: float = 1.0, num_output: int | None = None, **more: object) -> RequestRecord:
    fields: dict[str, object] = {"index": 0, "sent_s": sent_s, "arrivals_s": arrivals_s, "num_prompt": 10}
    return RequestRecord(**fields | {"num_output": len(arrivals_s) if num_output is None else num_output} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "ttft_s", "tpot_s", "e2e_s", "gaps_s"),
    [
        pytest.param(record(1.5, 1.7, 1.8, 2.0), 0.5, 0.5 / 3, 1.0, [0.2, 0.1, 0.2], id="a token an event"),
        pytest.param(record(1.5, 2.0, num_output=6), 0.5, 0.1, 1.0, [0.5], id="several tokens an event"),
        pytest.param(record(1.5), 0.5, None, 0.5, [], id="one token has no time per further token"),
        pytest.param(record(1.5, num_output=4), 0.5, 0.0, 0.5, [], id="all at once"),
        pytest.param(record(), None, None, None, [], id="nothing came"),
        pytest.param(RequestRecord(index=0), None, None, None, [], id="never sent"),
    ],
)
def test_times_of_one_request(
    seen: RequestRecord, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, gaps_s: Sequence[float]
) -> None:
    assert seen.ttft_s == pytest.approx(ttft_s)
    assert seen.tpot_s == pytest.approx(tpot_s)
    assert seen.e2e_s == pytest.approx(e2e_s)
    assert list(seen.gaps_s) == pytest.approx(gaps_s)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 50, 3.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        ([0.0, 10.0], 99, 9.9),
        ([0.0, 10.0], 100, 10.0),
        ([0.0, 10.0], 0, 0.0),
    ],
)
def test_percentiles_are_interpolated(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_spread_ignores_order_and_unknown_values() -> None:
    made = spread([3.0, None, 1.0, 2.0])
    assert made is not None
    assert (made.num, made.mean, made.p50, made.max) == (3, 2.0, 2.0, 3.0)
    assert spread([None]) is None


@pytest.mark.parametrize(
    ("seen", "objective", "met"),
    [
        pytest.param(record(1.5, 1.6), Objective(ttft_s=0.5, tpot_s=0.1000001), True, id="both kept, to the limit"),
        pytest.param(record(1.6, 1.7), Objective(ttft_s=0.5), False, id="first token late"),
        pytest.param(record(1.1, 1.9), Objective(ttft_s=0.5, tpot_s=0.1), False, id="others slow"),
        pytest.param(record(1.1, 1.9), Objective(ttft_s=0.5), True, id="others do not matter"),
        pytest.param(record(1.1), Objective(tpot_s=0.1), True, id="one token"),
        pytest.param(record(1.1, error="timeout"), Objective(ttft_s=0.5), False, id="failed, however fast"),
        pytest.param(record(error="timeout"), Objective(tpot_s=0.5), False, id="failed with nothing"),
    ],
)
def test_the_objective_decides_goodput(seen: RequestRecord, objective: Objective, met: bool) -> None:
    assert objective.met(seen) is met


def test_a_run_adds_up() -> None:
    """Two whole answers between 1 s and 5 s; one failure in the middle of an answer at 6 s stretches the run."""
    records = [
        record(2.0, 3.0, sent_s=1.0, num_cached=5),
        record(4.0, 5.0, sent_s=2.0, num_output=8, num_prompt=30, num_cached=15),
        record(6.0, sent_s=3.0, error="worker_lost"),
        record(sent_s=3.5, error="connection"),
        record(sent_s=3.5, error="connection"),
    ]
    report = make_report(records, Objective(ttft_s=1.5))
    assert (report.num_requests, report.num_completed) == (5, 2)
    assert report.errors == {"connection": 2, "worker_lost": 1}
    assert report.duration_s == 5.0
    assert (report.num_prompt_tokens, report.num_output_tokens) == (40, 10)
    assert (report.requests_per_s, report.output_tokens_per_s, report.total_tokens_per_s) == (0.4, 2.0, 10.0)
    assert (report.goodput, report.good_share) == (0.2, 0.2), "of five requests, one answered in time"
    assert report.cached_share == 0.5
    assert report.ttft_s is not None
    assert (report.ttft_s.num, report.ttft_s.max) == (2, 2.0), "failures have no latency"


def test_missing_figures_are_not_invented() -> None:
    report = make_report([record(2.0, 3.0)], Objective())
    assert report.goodput is None
    assert report.good_share is None
    assert report.cached_share is None
    assert report.late_s is None


@pytest.mark.parametrize("records", [[], [record(error="connection")], [RequestRecord(index=0, error="connection")]])
def test_a_run_in_which_nothing_came_has_no_rates(records: list[RequestRecord]) -> None:
    report = make_report(records, Objective(ttft_s=1.0))
    assert (report.duration_s, report.output_tokens_per_s, report.goodput) == (0.0, 0.0, 0.0)
    assert report.ttft_s is None


def test_lateness_is_the_clients_own() -> None:
    report = make_report([record(9.0, sent_s=1.25, due_s=1.0)], Objective())
    assert report.late_s is not None
    assert report.late_s.max == 0.25
    assert report.ttft_s is not None
    assert report.ttft_s.max == 7.75, "measured from when it was sent"
