"""The latency models: figures that anybody can check, and a calibration that finds what its points were made from."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from cluster.simulate.calibration import NOTHING, Measured, calibrate, read_points
from cluster.simulate.latency import Calibrated, Roofline, Step, step_of
from cluster.simulate.shapes import GPUS, MODELS, num_blocks
from protos.errors import Misconfigured

DECODE = step_of([(1, 1000)])
PROMPT = step_of([(8192, 8192)])


def test_one_sequence_decodes_at_the_speed_of_memory() -> None:
    roofline = Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-8b"])
    weights_s = 16.06e9 / (3.35e12 * roofline.memory_share)
    assert roofline.step_s(DECODE) == pytest.approx(weights_s + roofline.launch_s, rel=0.05)


def test_a_long_prompt_is_read_at_the_speed_of_arithmetic() -> None:
    roofline = Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-8b"])
    products_s = 2 * 8.03e9 * 8192 / (989e12 * roofline.compute_share)
    assert products_s < roofline.step_s(PROMPT) < 1.5 * products_s


@pytest.mark.parametrize("step", [DECODE, PROMPT])
def test_no_newer_card_is_slower(step: Step) -> None:
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
    assert model.touched_params(1) == pytest.approx(model.active_params)
    assert model.touched_params(1000) == pytest.approx(model.params, rel=0.001)


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
    long = step_of([(1, 100_000)] * 8)
    shared_s = 8 * 100_000 * mla.kv_bytes / (8 * GPUS["h200"].memory_rate * 0.75)
    eight = Roofline(gpu=GPUS["h200"], model=mla, tp=8)
    assert eight.step_s(long) - eight.step_s(step_of([(1, 1)] * 8)) == pytest.approx(8 * shared_s, rel=0.01)


def test_gpus_of_two_hosts_reduce_over_the_network() -> None:
    eight, sixteen = (Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-70b"], tp=tp) for tp in (8, 16))
    assert sixteen.step_s(DECODE) > eight.step_s(DECODE)


def test_a_calibration_finds_the_coefficients_and_says_how_well_it_fits() -> None:
    truth = Calibrated(base_s=0.003, row_s=1e-4, token_s=2e-5, read_s=1e-7, attended_s=0.0, request_s=0.005)
    shapes = [(tokens, before, rows) for tokens in (1, 64, 500) for before in (0, 900) for rows in (1, 4, 16)]
    steps = [step_of([(tokens, tokens + before)] * rows) for tokens, before, rows in shapes]
    points = [Measured(step=step, seconds=truth.step_s(step)) for step in steps]
    first_tokens = [Measured(step=one.step, seconds=one.seconds + truth.request_s, num_requests=1) for one in points]
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
    rests = [Measured(step=NOTHING, seconds=draw.choice((0.004, 0.008)), num_requests=1) for _ in range(200)]
    found = calibrate([*(Measured(step=a, seconds=b) for a, b in zip(steps, seconds, strict=True)), *rests])
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
    falling = [Measured(step=step, seconds=0.01 / step.num_rows) for step in steps]
    found = calibrate(falling)
    assert min(found.base_s, found.row_s, found.token_s, found.read_s, found.attended_s) >= 0
    assert found.error is not None
    assert found.worst is not None
    assert found.worst > found.error > 0


def test_a_fit_that_could_not_miss_does_not_say_that_it_is_right() -> None:
    one = Measured(step=step_of([(100, 100)]), seconds=0.01)
    assert calibrate([one]).error is None
    assert "cannot be told" in str(calibrate([one] * 3))
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
    def ran(at_once: int) -> list[Measured]:
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
        Measured(step=Step(2, 16, 160, 1200), seconds=0.001),
        Measured(step=Step(3, 24, 240, 1800), seconds=0.001),
        Measured(step=Step(1, 8, 80, 600), seconds=0.001),
        Measured(step=NOTHING, seconds=0.0035, num_requests=1),
    ]
