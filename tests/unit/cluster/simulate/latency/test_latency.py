"""The latency models: figures that anybody can check, and a calibration that finds what its points were made from."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.simulation.step_errors import BEGIN, END, NOTES, read, table
from cluster.simulate.latency.base import Calibrated, StepWork, step_of
from cluster.simulate.latency.calibration import NOTHING, MeasuredStep, calibrate, read_points
from cluster.simulate.latency.fitted import FITTED
from cluster.simulate.latency.roofline import HOST_S, Roofline
from cluster.simulate.latency.shapes import GPUS, MODELS, num_blocks
from cluster.simulate.run.config import hardware_spec, read_settings
from protos.errors import Misconfigured

DECODE = step_of([(1, 1000)])
PROMPT = step_of([(8192, 8192)])


def test_steps_take_as_long_as_kernels_that_were_measured() -> None:
    """The points of `benchmarks.simulation.step_errors`: dense models and DeepSeek-V3 on one host."""
    points = read()
    dense = [abs(point.error) for point in points if MODELS[point.model].experts is None]
    held_out = [abs(point.error) for point in points if not point.is_fitted]
    mixtures = [abs(point.error) for point in points if MODELS[point.model].experts is not None]
    assert {point.gpu for point in points} == set(GPUS)
    assert (len(dense) >= 28, len(held_out) >= 28, len(mixtures) >= 8) == (True, True, True)
    assert fmean(dense) < 0.08
    assert fmean(held_out) < 0.08
    assert max(dense) < 0.15
    assert max(mixtures) < 0.20


def test_steps_take_as_long_as_the_engines_on_an_h200() -> None:
    """The steps of `benchmarks.gpu.engine`, in the middle of those that it measures."""
    measured = json.loads((NOTES.parent / "gpu-h200" / "engine.json").read_text(encoding="utf-8"))
    seconds = {one["what"]: one["seconds"] for one in measured["figures"]}
    model = Roofline(gpu=GPUS["h200"], model=MODELS["llama-3-8b"], tp=1, host_s=0.0)
    for rows in (1, 4, 16, 64):
        ours_s = model.step_s(step_of([(1, 1024 + 96)] * rows))
        assert ours_s == pytest.approx(seconds[f"decode step, {rows} x 1024"], rel=0.06)
    assert model.step_s(step_of([(8192, 8192)])) == pytest.approx(seconds["prompt of 8192"], rel=0.15)


def test_the_table_of_the_docs_is_that_of_the_points() -> None:
    assert f"{BEGIN}\n{table(read())}\n{END}" in NOTES.read_text(encoding="utf-8")


@pytest.mark.parametrize("step", [DECODE, PROMPT])
def test_no_newer_card_is_slower(step: StepWork) -> None:
    times = [
        Roofline(gpu=GPUS[name], model=MODELS["llama-3-8b"]).step_s(step) for name in ("a100", "h100", "h200", "b200")
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] / 2


def test_more_gpus_are_faster_but_not_as_many_times() -> None:
    one, eight = (Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-70b"], tp=tp).step_s(PROMPT) for tp in (1, 8))
    assert one / 8 < eight < one


def test_a_token_of_a_mixture_touches_few_of_its_experts() -> None:
    model = MODELS["deepseek-v3"]
    assert model.active_params == pytest.approx(37e9, rel=0.05)
    assert model.expert_params == pytest.approx(654e9, rel=0.001)
    assert model.experts is not None
    assert model.experts.touched(1) == 8
    assert model.experts.touched(1000) == pytest.approx(256)


def test_weights_that_do_not_fit_are_refused_with_the_number_of_gpus() -> None:
    with pytest.raises(Misconfigured, match="use 2 GPUs"):
        num_blocks(GPUS["h100"], MODELS["llama-3-70b"], tp=1, block_size=64)
    assert num_blocks(GPUS["h100"], MODELS["llama-3-70b"], tp=4, block_size=64) > 1000


def test_a_fix_that_is_named_is_one() -> None:
    """671 GB need 10 GPUs of 80 GB, and 10 do not divide the heads; of 1 GB each no number of them is enough."""
    with pytest.raises(Misconfigured, match="use 16 GPUs or more"):
        num_blocks(GPUS["h100"], MODELS["deepseek-v3"], tp=8, block_size=64)
    assert num_blocks(GPUS["h100"], MODELS["deepseek-v3"], tp=16, block_size=64) > 0
    with pytest.raises(Misconfigured, match="use GPUs with more memory"):
        num_blocks(replace(GPUS["a100"], memory_bytes=1e9), MODELS["deepseek-v3"], tp=1, block_size=64)


def test_ranks_beyond_the_key_value_heads_keep_copies() -> None:
    """An H200 of eight has 344 GB beside DeepSeek's weights: 4.9 million tokens of 70 kB if they shared, which one head
    of MLA does not allow."""
    mla, gqa = MODELS["deepseek-v3"], MODELS["llama-3-70b"]
    assert num_blocks(GPUS["h200"], mla, tp=8, block_size=64) * 64 == pytest.approx(344e9 / 70_272 / 8, rel=0.01)
    assert gqa.kept_bytes(8) == gqa.kv_bytes == gqa.kept_bytes(16) / 2
    four, eight = (Roofline(gpu=GPUS["h200"], model=mla, tp=tp).parts(step_of([(1, 100_000)] * 8)) for tp in (4, 8))
    assert eight.attention > 0.8 * four.attention, "each rank reads all that is cached"


def test_gpus_of_two_hosts_reduce_over_the_network() -> None:
    eight, sixteen = (Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-70b"], tp=tp) for tp in (8, 16))
    assert sixteen.step_s(DECODE) > eight.step_s(DECODE)
    faster = Roofline(gpu=replace(GPUS["h100"], network_rate=100e9), model=MODELS["llama-3-70b"], tp=16)
    within, of_16, of_16_faster = (one.parts(PROMPT).reduce for one in (eight, sixteen, faster))
    crossing_s = 161 * 8192 * 8192 * 2 / 8 / 50e9  # each GPU's card carries an eighth, out and back between two hosts
    assert of_16 - within == pytest.approx(crossing_s + 161 * 2 * 10e-6, rel=0.001)
    assert of_16 - of_16_faster == pytest.approx(crossing_s / 2, rel=0.001)


def test_latent_attention_that_is_absorbed_compares_what_is_cached() -> None:
    """A head compares 512 + 64 numbers with each position, and sums up 512: where nothing else bounds it, that is the
    arithmetic of 16 heads a GPU and 61 layers."""
    slow = Roofline(gpu=GPUS["h200"], model=MODELS["deepseek-v3"], tp=8, slowness=1000)
    share = FITTED["h200"].latent.compute_share
    some, more = (slow.parts(step_of([(1, context)] * 8)).attention for context in (1000, 2000))
    flops = 61 * 16 * 2 * (512 + 64 + 512) * 8 * 1000
    assert more - some == pytest.approx(flops / (989e12 / 1000 * share), rel=0.001)


def test_a_gpu_without_fp8_is_refused_weights_of_it() -> None:
    with pytest.raises(Misconfigured, match=r"--gpu a100 .* no FP8: give one of h100, h200, b200"):
        hardware_spec(gpu="a100", model="deepseek-v3", tp=16)


def test_host_work_shows_where_no_step_is_in_flight() -> None:
    """Elsewhere the device computes meanwhile (ADR 10)."""

    def step_s(*settings: str) -> float:
        return hardware_spec(
            gpu="h100", model="llama-3-8b", tp=1, settings=read_settings(None, settings)
        ).latency.step_s(DECODE)

    assert step_s("worker.steps_in_flight=0") == pytest.approx(step_s() + HOST_S)


def test_a_calibration_finds_the_coefficients_and_says_how_well_it_fits() -> None:
    truth = Calibrated(base_s=0.003, row_s=1e-4, token_s=2e-5, read_s=1e-7, attended_s=0.0, request_s=0.005)
    shapes = [(tokens, before, rows) for tokens in (1, 64, 500) for before in (0, 900) for rows in (1, 4, 16)]
    steps = [step_of([(tokens, tokens + before)] * rows) for tokens, before, rows in shapes]
    points = [MeasuredStep(step=step, seconds=truth.step_s(step)) for step in steps]
    first_tokens = [
        MeasuredStep(step=one.step, seconds=one.seconds + truth.request_s, num_requests=1) for one in points
    ]
    found = calibrate([*points, *first_tokens])
    assert found.request_s == pytest.approx(truth.request_s)
    assert found.error is not None
    assert found.error < 1e-6
    assert [found.step_s(step) for step in steps] == pytest.approx([truth.step_s(step) for step in steps])


def test_a_calibration_is_right_on_average_whatever_single_steps_scatter_by_and_whatever_stood_still() -> None:
    """Steps that take half or twice as long, one in a hundred that stalls, and one during which nothing moved for a
    minute."""
    truth, draw = Calibrated(base_s=0.003, row_s=2e-4, token_s=3e-5, read_s=0.0, attended_s=0.0), random.Random(0)
    steps = [step_of([(tokens, tokens)] * rows) for tokens in (1, 1, 1, 200) for rows in range(1, 9)] * 40
    seconds = [truth.step_s(step) * draw.choice((0.5, 0.75, 0.75, 1.0, 2.0)) for step in steps]
    seconds[7::100] = [one + 0.2 for one in seconds[7::100]]
    seconds[7] += 60.0
    rests = [MeasuredStep(step=NOTHING, seconds=draw.choice((0.004, 0.008)), num_requests=1) for _ in range(200)]
    found = calibrate([*(MeasuredStep(step=a, seconds=b) for a, b in zip(steps, seconds, strict=True)), *rests])
    assert [found.step_s(step) for step in steps] == pytest.approx([truth.step_s(step) for step in steps], rel=0.08)
    assert found.request_s == pytest.approx(0.006, rel=0.05)
    assert found.error is not None
    assert found.error < 0.08, "what single steps scatter by is no error"
    assert found.spread == pytest.approx(0.51, abs=0.05)
    chance = found.chance("a device")
    assert chance is not None
    drawn = [chance.step_s(number, 0.005) for number in range(2000)]
    assert drawn == [chance.step_s(number, 0.005) for number in range(2000)]
    usual, stalled = ([one for one in drawn if (one > 0.05) is is_long] for is_long in (False, True))
    assert fmean(usual) == pytest.approx(0.005, rel=0.05)
    assert (min(usual), max(usual)) == pytest.approx((0.0025, 0.01), rel=0.1)
    mean_s = fmean(truth.step_s(step) for step in steps)
    assert len(stalled) / len(drawn) == pytest.approx(0.01 * 0.005 / mean_s, rel=0.5)


def test_no_coefficient_is_negative_however_noisy_the_steps() -> None:
    steps = [step_of([(1, 100)] * rows) for rows in range(1, 9)]
    falling = [MeasuredStep(step=step, seconds=0.01 / step.num_rows) for step in steps]
    found = calibrate(falling)
    assert min(found.base_s, found.row_s, found.token_s, found.read_s, found.attended_s) >= 0
    assert found.error is not None
    assert found.worst is not None
    assert found.worst > found.error > 0


def test_a_fit_that_could_not_miss_does_not_say_that_it_is_right() -> None:
    one = MeasuredStep(step=step_of([(100, 100)]), seconds=0.01)
    assert calibrate([one]).error is None
    assert "too few points to know its error" in str(calibrate([one] * 3))
    assert "calibrated on 1 step:" in str(calibrate([one]))


def test_measured_steps_are_read_from_a_file_and_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps([{"rows": [[1, 10], [8, 8]], "seconds": 0.5}]))
    (point,) = read_points(file)
    assert (point.step.num_rows, point.step.num_tokens, point.step.num_read, point.seconds) == (2, 9, 18, 0.5)
    at_a_rate = {"workload": {"concurrency": None}, "figures": {}}
    for wrong, told in (
        ("[{}]", r"steps\.json"),
        ("a = 1", "it is not JSON"),
        (json.dumps(at_a_rate), "--concurrency"),
    ):
        file.write_text(wrong)
        with pytest.raises(Misconfigured, match=told):
            read_points(file)
    with pytest.raises(Misconfigured, match=r"nowhere\.json: No such file"):
        read_points(tmp_path / "nowhere.json")


def test_figures_of_a_bench_are_steps_too(tmp_path: Path) -> None:
    def ran(at_once: int) -> list[MeasuredStep]:
        file = tmp_path / f"{at_once}.json"
        figures = {
            "num_completed": 10, "num_prompt_tokens": 1000, "num_output_tokens": 400,
            "ttft_s": {"mean": 0.2}, "tpot_s": {"mean": 0.01},
        }  # fmt: skip
        file.write_text(json.dumps({"figures": figures, "workload": {"concurrency": at_once}}))
        return read_points(file)

    token, prompt = ran(1)
    assert (token.step.num_tokens, token.step.num_read, token.seconds) == (1, 120, 0.01)
    assert (prompt.step.num_tokens, prompt.step.num_rows, prompt.seconds) == (100, 1, 0.2)
    assert (token.num_requests, prompt.num_requests) == (0, 1)
    (four,) = ran(4)
    others_tokens = 3 * 100 / 40  # a step: three prompts are read while one answer of 40 is written
    assert (four.step.num_rows, four.step.num_tokens) == (4, 4 + others_tokens)


def test_a_profile_of_a_bench_is_its_steps(tmp_path: Path) -> None:
    """Two workers at once; a step is all that its engine did for it; a tick that launched nothing is none's. And what
    requests that were alone took beside their steps."""

    def spans(pid: int, start: int, rows: int) -> list[dict[str, object]]:
        told = {"step": 1, "num_rows": rows, "num_tokens": 8 * rows, "num_read": 80 * rows, "num_attended": 600 * rows}
        parts = [
            ("tick", 0, 100, {}),
            ("plan", 100, 50, {}),
            ("launch", 150, 700, told),
            ("apply", 900, 80, told),
            ("tell", 980, 20, {}),
        ]
        return [
            {"name": name, "ph": "X", "ts": start + ts, "dur": dur, "pid": pid, "tid": 0, "args": args}
            for name, ts, dur, args in parts
        ]

    idle = {"name": "tick", "ph": "X", "ts": 0, "dur": 100, "pid": 1, "tid": 0, "args": {}}
    events = [{"name": "process_name", "ph": "M", "pid": 1}, idle, *spans(2, 4500, 3), *spans(1, 4000, 2)]
    events += spans(1, 10000, 1)
    for number, (begin, first, end) in enumerate(((3900, 5600, 8000), (4100, 5700, 7000), (9500, 14000, 15000))):
        times = (("b", begin), ("n", first), ("e", end))
        events += [{"name": "request", "cat": "request", "id": number, "ph": ph, "ts": ts} for ph, ts in times]
    (tmp_path / "profile.json").write_text(json.dumps({"traceEvents": events}))
    assert read_points(tmp_path / "profile.json") == [
        MeasuredStep(step=StepWork(2, 16, 160, 1200), seconds=0.001),
        MeasuredStep(step=StepWork(3, 24, 240, 1800), seconds=0.001),
        MeasuredStep(step=StepWork(1, 8, 80, 600), seconds=0.001),
        MeasuredStep(step=NOTHING, seconds=0.0035, num_requests=1),
    ]
