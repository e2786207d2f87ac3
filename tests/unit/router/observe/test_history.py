"""The last hour of a gateway: what the page draws is what clients saw, of one process and of several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from protos.errors import Overloaded
from protos.values import WorkerLoad, WorkerRole
from router.observe.history import NUM_PERIODS, PERIOD_S, History, HistorySampler, quantile
from router.request_metrics import GAP_SECONDS, SECONDS, RequestMetrics
from router.text.text_stream import TextDelta, Usage
from tests.unit.router.fleet.test_fleet_revisions import info
from tests.unit.router.scripted import Crew, Worker

NOW = 1_700_000_000


def sampler(history: History, metrics: RequestMetrics | None = None, num_waiting: int = 0) -> HistorySampler:
    line = SimpleNamespace(num_waiting=num_waiting)
    worker = Worker(info=info(WorkerRole.DECODE, ""), load=WorkerLoad(num_blocks=10, num_free_blocks=4))
    return HistorySampler(history, metrics=metrics or RequestMetrics(), fleet=Crew(worker), line=line)


def serve(metrics: RequestMetrics) -> None:
    """One request of 8 prompt tokens, 6 of them cached, and 3 tokens of output; and one that is refused."""
    with metrics.track("chat.completions") as track:
        for _ in range(3):
            track.saw(TextDelta(index=0, text="x", num_tokens=1))
        track.used(Usage(prompt_tokens=8, completion_tokens=3, cached_tokens=6))
    with pytest.raises(Overloaded), metrics.track("completions"):
        raise Overloaded("full")


async def test_a_period_has_its_own_counts() -> None:
    history, metrics = History(), RequestMetrics()
    sampling = sampler(history, metrics, num_waiting=4)
    serve(metrics)
    open_track = metrics.track("completions")
    sampling.sample(NOW)
    sampling.sample(NOW + PERIOD_S)
    open_track.finish()
    busy, quiet = history.since(0)
    assert busy["at"] == NOW
    assert busy["requests_per_s"] * 3 == pytest.approx(busy["output_tokens_per_s"] * 2)
    assert busy["hit_rate"] == 0.75
    assert 0 < busy["ttft_p50_s"] <= busy["ttft_p95_s"] <= SECONDS[0]
    assert 0 < busy["tpot_p50_s"] <= GAP_SECONDS[0]
    assert (busy["waiting"], busy["in_flight"]) == (4, 1)
    assert (busy["kv_use"], busy["ready"]) == ({"decode": 0.6}, {"decode": 1})
    assert (quiet["ttft_p50_s"], quiet["tpot_p95_s"], quiet["hit_rate"]) == (None, None, None)
    assert (quiet["output_tokens_per_s"], quiet["requests_per_s"]) == (0, 0)


async def test_a_clock_set_back_loses_no_count() -> None:
    history, metrics = History(), RequestMetrics()
    sampling = sampler(history, metrics)
    sampling.sample(NOW)
    serve(metrics)
    for now in (NOW - 300, NOW + 0.4, NOW + PERIOD_S):
        sampling.sample(now)
    assert [sample["at"] for sample in history.since(0)] == [NOW, NOW + PERIOD_S]
    assert history.since(NOW)[0]["hit_rate"] == 0.75


def test_it_keeps_an_hour() -> None:
    history = History()
    for number in range(NUM_PERIODS + 5):
        history.add({"at": NOW + PERIOD_S * number})
    samples = history.since(0)
    assert (len(samples), samples[-1]["at"] - samples[0]["at"]) == (NUM_PERIODS, 3600 - PERIOD_S)
    assert history.since(history.last_at - PERIOD_S) == samples[-1:]


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((2, 2, 0), 0.5, 1.0),
        ((2, 2, 0), 0.75, 2.0),
        ((0, 0, 7), 0.1, 3.0),
    ],
)
def test_quantiles_equal_histogram_quantile(counts: tuple[int, ...], part: float, expected: float | None) -> None:
    assert quantile((1.0, 3.0), counts, part) == expected
