"""GPUs, models, lanes and step times that are not those of the built-in tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.simulate.latency.gpus_and_models import gpu_of, model_of, read_model
from cluster.simulate.latency.roofline import Roofline
from cluster.simulate.latency.shapes import FP8_BLOCK, GPUS, MODELS
from cluster.simulate.latency.step_work import step_of
from cluster.simulate.run.simulation_config import hardware_spec, read_settings
from cluster.simulate.world.simulated_lanes import Cards
from protos.errors import Misconfigured, UnsupportedModel
from tests.unit.cluster.simulate.asking import SMALL, answer
from workers.kv.groups import with_windows
from workers.models.model_config import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14_336, "vocab_size": 128_256, "max_position_embeddings": 131_072,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 1,
    "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "rope_theta": 10_000,
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18_432, "vocab_size": 129_280, "max_position_embeddings": 163_840, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201_088,
    "max_position_embeddings": 131_072, "sliding_window": 128, "num_experts_per_tok": 4, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "eos_token_id": 200_002, "attention_bias": True, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def written(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("name", "config"), [("llama-3-8b", LLAMA), ("deepseek-v3", DEEPSEEK)])
def test_a_checkpoints_config_describes_its_model(name: str, config: dict[str, object], tmp_path: Path) -> None:
    model = model_of(written(tmp_path, config))
    assert model.params == pytest.approx(MODELS[name].params, rel=0.003)
    assert replace(model, params=MODELS[name].params) == MODELS[name]
    assert model_of(str(tmp_path)) == model, "its folder will do"


def test_experts_of_a_checkpoint_are_counted_as_its_makers_do(tmp_path: Path) -> None:
    """Mixtral 8x7B: 46.7 billion parameters."""
    model = model_of(written(tmp_path, MIXTRAL))
    assert model.params == pytest.approx(46.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "config.json: model_type"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size.*4096"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ([], "config.json"),
        ({**LLAMA, "quantization_config": {"quant_method": "quanto"}}, "'quanto'.*hardware.dtype: bfloat16, fp8"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(config: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=named):
        model_of(written(tmp_path, config))


def grouped(**weights: object) -> dict[str, object]:
    packed = "pack-quantized" if weights["num_bits"] == 4 else f"{weights['type']}-quantized"
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": packed, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        ({"quant_method": "exl2", "bits": 4.25}, "int4"),
        ({"quant_method": "exl2", "bits": 6.5}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (grouped(num_bits=4, type="int", strategy="group", group_size=128), "int4"),
        (grouped(num_bits=8, type="int", strategy="channel"), "int8"),
        (grouped(num_bits=8, type="float", strategy="channel"), "fp8"),
        (grouped(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), "fp8_block"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_weights_have_the_type_of_a_quantised_checkpoint(
    quantization: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    path = written(tmp_path, {**LLAMA, "quantization_config": quantization})
    assert model_of(path) == replace(model_of(written(tmp_path, LLAMA)), dtype=dtype)
    path = written(tmp_path, {**LLAMA, "quantization_config": quantization})
    assert model_of(path, "bf16").dtype == "bfloat16"


def test_a_type_replaces_one_that_is_not_simulated(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "quanto"}})
    assert model_of(path, "int4").dtype == "int4"


def test_a_gpu_of_ones_own_is_like_another_but_for_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "h800.toml"
    path.write_text('like = "h100"\nlink_gb_per_s = 200\nnetwork_gbit_per_s = 200\nfp8_tflops = 0\n')
    assert gpu_of(str(path)) == replace(GPUS["h100"], link_rate=200e9, network_rate=25e9, fp8_flops=None)
    for text, named in (
        ('like = "v100"', "like = 'v100': name the GPU of a100, h100"),
        ("tflops = 1", "like = None"),
        ('like = "h100"\nflops = 1', "flops: there are like, tflops"),
        ('like = "h100"\ntflops = "fast"', "tflops = 'fast': give a number from 0.001"),
        ('like = "h100"\nmemory_gb = 0', "memory_gb = 0: give a number"),
        ("like", "is not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(Misconfigured, match=named):
            gpu_of(str(path))
    with pytest.raises(Misconfigured, match=r"none\.toml: No such file"):
        gpu_of(str(tmp_path / "none.toml"))


def test_a_simulation_of_ones_own_gpu_and_model(tmp_path: Path) -> None:
    model, gpu = written(tmp_path, LLAMA), tmp_path / "mine.toml"
    gpu.write_text('like = "h100"\n')
    own, named = tmp_path / "own.json", tmp_path / "named.json"
    answer(*SMALL, f"hardware.gpu={gpu}", f"hardware.model={model}", "--json", str(own))
    answer(*SMALL, "--json", str(named))
    assert json.loads(own.read_text())["runs"][0]["figures"]["cluster"].endswith("GPU mine.toml, model config.json")
    times = [json.loads(path.read_text())["runs"][0]["figures"]["report"]["ttft_s"]["mean"] for path in (own, named)]
    assert times[0] == pytest.approx(times[1], rel=0.01)


def test_one_byte_weights_take_less_time_and_memory() -> None:
    whole, half = (hardware_spec(gpu="h100", model="llama-3-70b", tp=4, dtype=dtype) for dtype in ("bfloat16", "fp8"))
    assert half.num_blocks > whole.num_blocks * 1.3
    step = step_of([(1, 1000)])
    assert half.latency.step_s(step) < 0.9 * whole.latency.step_s(step)


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.508), ("int4", 0.258)])
def test_integer_weights_take_fewer_bytes_and_no_less_arithmetic(dtype: str, share: float) -> None:
    floats, integers = (
        hardware_spec(gpu="a100", model="llama-3-70b", tp=4, dtype=kind) for kind in ("bfloat16", dtype)
    )
    assert integers.num_blocks > floats.num_blocks * 1.3
    kind, prompt = step_of([(1, 1000)]), step_of([(8192, 8192)])
    assert share < integers.latency.step_s(kind) / floats.latency.step_s(kind) < share + 0.4
    assert integers.latency.step_s(prompt) > 0.9 * floats.latency.step_s(prompt)


def test_8_bit_kv_takes_less_room_and_time() -> None:
    plain, rounded = (
        hardware_spec(gpu="h100", model="llama-3-8b", tp=1, settings=read_settings(f"worker.kv_dtype={kv_dtype}"))
        for kv_dtype in ("auto", "int8")
    )
    assert 1.9 * plain.num_blocks < rounded.num_blocks < 2 * plain.num_blocks
    assert 0.51 < rounded.layout.block_bytes / plain.layout.block_bytes <= 0.52
    long = step_of([(1, 32_000)] * 16)
    assert rounded.latency.step_s(long) < 0.7 * plain.latency.step_s(long)


def test_latents_of_8_bits_are_refused_by_name() -> None:
    settings = read_settings("worker.kv_dtype=int8")
    with pytest.raises(UnsupportedModel, match="kv_dtype is int8"):
        hardware_spec(gpu="h100", model="deepseek-v3", tp=16, settings=settings)


def test_pools_have_gpus_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    large = "hardware.model=llama-3-70b", "hardware.gpu=h200", "cluster.prefill=2"
    told = answer(*SMALL, *large, "cluster.prefill_tp=2", "cluster.decode_tp=8", "--json", str(file))
    assert "2P tp2 + 1D tp8" in told
    (run,) = json.loads(file.read_text())["runs"]
    assert (run["cluster"]["prefill_tp"], run["cluster"]["decode_tp"]) == (2, 8)
    same = tmp_path / "same.json"
    answer(*SMALL, *large, "cluster.tp=2", "--json", str(same))
    (other,) = json.loads(same.read_text())["runs"]
    assert run["figures"]["report"]["tpot_s"]["mean"] < 0.6 * other["figures"]["report"]["tpot_s"]["mean"]
    assert run["figures"]["costs"]["gpu_hours"] == pytest.approx(2 * other["figures"]["costs"]["gpu_hours"], rel=0.1)


def test_a_lane_is_as_fast_as_its_slower_card() -> None:
    assert Cards(rates={"prefill-0": 50e9, "decode-0": 200e9}).rate_between("prefill-0", "decode-0") == 50e9


def test_kv_takes_the_time_of_the_cards(tmp_path: Path) -> None:
    """3,000 tokens of 131 kB take 315 ms at 10 Gb/s, of which some are sent before the first token."""

    def longest_gap_s(*more: str) -> float:
        file = tmp_path / "run.json"
        load = "workload.requests=10", "workload.rate=1", "workload.input_len=3000", "workload.output_len=20"
        answer(*load, *more, "--json", str(file))
        return float(json.loads(file.read_text())["runs"][0]["figures"]["report"]["itl_s"]["max"])

    assert longest_gap_s("hardware.lane_gbps=10") > 5 * longest_gap_s()


def test_a_rooflines_parts_are_its_whole() -> None:
    roofline = Roofline(gpu=GPUS["h200"], model=MODELS["deepseek-v3"], tp=8)
    step = step_of([(1, 4000)] * 64 + [(512, 2048)])
    assert roofline.step_s(step) == pytest.approx(roofline.parts(step).total())
    assert roofline.model.dtype == FP8_BLOCK


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_windows_and_experts_count_as_in_the_engine(name: str, tmp_path: Path) -> None:
    shape = MODELS[name]
    assert shape.experts is not None
    written(tmp_path, GPT_OSS | {"num_hidden_layers": shape.layers, "num_local_experts": shape.experts.num})
    engine, model = read_config(tmp_path), model_of(str(tmp_path))
    layout = with_windows(engine.kv_layout(block_size=16, dtype="bfloat16"), engine.windows)
    assert shape.layout(16) == model.layout(16) == layout
    assert len(layout.groups) == 2
    assert (model.experts, model.expert_dtype) == (shape.experts, "mxfp4")
    assert model.params == pytest.approx(shape.params, rel=0.01)
    assert model.held_bytes(1) == pytest.approx(shape.held_bytes(1), rel=0.01)


def test_whole_experts_on_ranks_wait_for_the_busiest() -> None:
    """Experts of `baton serve --expert-parallel`: the same all-reduce, the same bytes if all experts are chosen."""
    columns, whole = (
        hardware_spec(
            gpu="h200",
            model="qwen3-30b-a3b",
            tp=4,
            settings=read_settings(f"worker.expert_parallel={flag}"),
        ).latency
        for flag in ("false", "true")
    )
    few, many = step_of([(1, 500)] * 4), step_of([(8192, 8192)])
    assert columns.step_s(few) < whole.step_s(few) < 1.5 * columns.step_s(few)
    assert columns.step_s(many) < whole.step_s(many) < 1.05 * columns.step_s(many)


def test_latents_are_counted_as_the_engine_counts_them(tmp_path: Path) -> None:
    path = written(tmp_path, {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]})
    engine = read_config(tmp_path).kv_layout(block_size=16, dtype="bfloat16")
    assert model_of(path).layout(16) == engine
    assert engine.block_bytes == 16 * 61 * 576 * 2


@pytest.mark.parametrize(
    ("changes", "total", "num_active"),
    [
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 3584, "num_attention_heads": 28,
             "num_key_value_heads": 4, "num_hidden_layers": 28, "intermediate_size": 18944, "num_experts": 64,
             "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
            57.4, 8,
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
             "num_key_value_heads": 4, "num_hidden_layers": 48, "intermediate_size": 6144,
             "moe_intermediate_size": 768},
            30.5, 8,
        ),
    ],
    ids=["shared-expert", "defaults-of-the-family"],
)  # fmt: skip
def test_experts_are_read_as_the_engine_reads_them(
    changes: dict[str, Any], total: float, num_active: int, tmp_path: Path
) -> None:
    """The totals of Qwen2-57B-A14B and Qwen3-30B-A3B, in billions, as their makers count them."""
    config = {"vocab_size": 151936, "max_position_embeddings": 32768} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path / "config.json")
    assert model.params / 1e9 == pytest.approx(total, rel=0.002)
    assert model.experts is not None
    assert model.experts.num_active == num_active


def test_experts_that_the_engine_would_refuse_are_refused(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64, "num_local_experts": 2,
        "num_experts_per_tok": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Misconfigured, match="num_experts_per_tok"):
        read_model(tmp_path / "config.json")
