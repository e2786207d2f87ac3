"""The latency models: figures that anybody can check."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.simulation.step_errors import BEGIN, END, NOTES, read, table
from cluster.simulate.latency.kernels import FITTED
from cluster.simulate.latency.roofline import HOST_S, Roofline
from cluster.simulate.latency.shapes import GPUS, MODELS, num_blocks
from cluster.simulate.latency.step_work import StepWork, step_of
from cluster.simulate.run.simulation_config import hardware_spec, read_settings
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
    measured = json.loads((NOTES.parent / "gpu-h200" / "engine.json").read_text(encoding="utf-8"))
    seconds = {figure["what"]: figure["seconds"] for figure in measured["figures"]}
    model = Roofline(gpu=GPUS["h200"], model=MODELS["llama-3-8b"], tp=1, host_s=0.0)
    for rows in (1, 4, 16, 64):
        ours_s = model.step_s(step_of([(1, 1024 + 96)] * rows))
        assert ours_s == pytest.approx(seconds[f"decode step, {rows} x 1024"], rel=0.06)
    assert model.step_s(step_of([(8192, 8192)])) == pytest.approx(seconds["prompt of 8192"], rel=0.15)


def test_the_docs_table_matches_the_points() -> None:
    assert f"{BEGIN}\n{table(read())}\n{END}" in NOTES.read_text(encoding="utf-8")


@pytest.mark.parametrize("step", [DECODE, PROMPT])
def test_no_newer_card_is_slower(step: StepWork) -> None:
    times = [
        Roofline(gpu=GPUS[name], model=MODELS["llama-3-8b"]).step_s(step) for name in ("a100", "h100", "h200", "b200")
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] / 2


def test_more_gpus_are_faster_but_not_as_many_times() -> None:
    single, eight = (Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-70b"], tp=tp).step_s(PROMPT) for tp in (1, 8))
    assert single / 8 < eight < single


def test_a_token_of_a_mixture_touches_few_of_its_experts() -> None:
    model = MODELS["deepseek-v3"]
    assert model.expert_params == pytest.approx(654e9, rel=0.001)
    assert model.experts is not None
    assert model.experts.touched(1) == 8
    assert model.experts.touched(1000) == pytest.approx(256)


def test_oversized_weights_are_refused_with_a_number_of_gpus() -> None:
    with pytest.raises(Misconfigured, match="use 2 GPUs"):
        num_blocks(GPUS["h100"], MODELS["llama-3-70b"], tp=1, block_size=64)
    assert num_blocks(GPUS["h100"], MODELS["llama-3-70b"], tp=4, block_size=64) > 1000


def test_a_named_fix_is_valid() -> None:
    with pytest.raises(Misconfigured, match="use 16 GPUs or more"):
        num_blocks(GPUS["h100"], MODELS["deepseek-v3"], tp=8, block_size=64)
    assert num_blocks(GPUS["h100"], MODELS["deepseek-v3"], tp=16, block_size=64) > 0
    with pytest.raises(Misconfigured, match="use GPUs with more memory"):
        num_blocks(replace(GPUS["a100"], memory_bytes=1e9), MODELS["deepseek-v3"], tp=1, block_size=64)


def test_ranks_beyond_the_key_value_heads_keep_copies() -> None:
    mla, gqa = MODELS["deepseek-v3"], MODELS["llama-3-70b"]
    assert num_blocks(GPUS["h200"], mla, tp=8, block_size=64) * 64 == pytest.approx(344e9 / 70_272 / 8, rel=0.01)
    assert gqa.kept_bytes(8) == gqa.kv_bytes == gqa.kept_bytes(16) / 2
    four, eight = (Roofline(gpu=GPUS["h200"], model=mla, tp=tp).parts(step_of([(1, 100_000)] * 8)) for tp in (4, 8))
    assert eight.attention > 0.8 * four.attention, "each rank reads all that is cached"


def test_gpus_of_two_hosts_reduce_over_the_network() -> None:
    eight, sixteen = (Roofline(gpu=GPUS["h100"], model=MODELS["llama-3-70b"], tp=tp) for tp in (8, 16))
    assert sixteen.step_s(DECODE) > eight.step_s(DECODE)
    faster = Roofline(gpu=replace(GPUS["h100"], network_rate=100e9), model=MODELS["llama-3-70b"], tp=16)
    within, of_16, of_16_faster = (roofline.parts(PROMPT).reduce for roofline in (eight, sixteen, faster))
    crossing_s = 161 * 8192 * 8192 * 2 / 8 / 50e9  # each GPU's card carries an eighth, out and back between two hosts
    assert of_16 - within == pytest.approx(crossing_s + 161 * 2 * 10e-6, rel=0.001)
    assert of_16 - of_16_faster == pytest.approx(crossing_s / 2, rel=0.001)


def test_absorbed_latent_attention_reads_the_cached_vector() -> None:
    slow = Roofline(gpu=GPUS["h200"], model=MODELS["deepseek-v3"], tp=8, slowness=1000)
    share = FITTED["h200"].latent.compute_share
    some, more = (slow.parts(step_of([(1, context)] * 8)).attention for context in (1000, 2000))
    flops = 61 * 16 * 2 * (512 + 64 + 512) * 8 * 1000
    assert more - some == pytest.approx(flops / (989e12 / 1000 * share), rel=0.001)


def test_a_gpu_without_fp8_is_refused_weights_of_it() -> None:
    with pytest.raises(Misconfigured, match=r"a100.* no FP8: give one of h100, h200, b200"):
        hardware_spec(gpu="a100", model="deepseek-v3", tp=16)


def test_host_work_shows_where_no_step_is_in_flight() -> None:
    """Elsewhere the device computes meanwhile (ADR 10)."""

    def step_s(*settings: str) -> float:
        return hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=read_settings(*settings)).latency.step_s(
            DECODE
        )

    assert step_s("worker.steps_in_flight=0") == pytest.approx(step_s() + HOST_S)
