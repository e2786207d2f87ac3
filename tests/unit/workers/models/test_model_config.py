"""`read_config` understands a config or refuses it by name: without torch, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import BadCheckpoint, UnsupportedModel
from workers.models.families.traits import QueryGrowth
from workers.models.model_config import ModelConfig, read_config
from workers.models.rope_kinds import LinearRope, Llama3Rope, Rope, YarnRope
from workers.weights.weight_formats import FP8Settings

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_llama_2_as_meta_published_it(tmp_path: Path) -> None:
    """No grouped queries, no rope parameters, one end token."""
    config = write(tmp_path, {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.family, config.num_kv_heads, config.head_dim, config.dtype) == ("llama", 4, 8, "bfloat16")
    assert config.rope == Rope(theta=10_000.0)
    assert config.windows == (None,) * 4
    parts = (config.qkv_bias, config.o_bias, config.mlp_bias, config.tied_embeddings)
    assert parts == (False,) * 4
    assert config.qk_norm is None


def test_llama_3_1_as_meta_published_it(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = write(
        tmp_path,
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling, "max_position_embeddings": 131072},
        {"eos_token_id": [5, 7, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    )
    assert config.rope == Llama3Rope(
        theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert config.max_model_len == 131072
    assert config.eos_token_ids == (5, 7, 2)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 9}, (9, 2)), ({"eos_token_id": None}, (2,))],
)
def test_end_tokens_come_from_both_configs(
    generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert write(tmp_path, LLAMA, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 7}, (7, 7, 7, 7)),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        (QWEN2 | {"sliding_window": 7, "max_window_layers": 3}, (None,) * 4),
        (QWEN2 | {"sliding_window": 7, "max_window_layers": 3, "use_sliding_window": True}, (None, None, None, 7)),
        (
            QWEN3
            | {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            (None, 7, None, 7),
        ),
    ],
)
def test_windows_are_read_as_each_family_writes_them(
    config: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert write(tmp_path, config).windows == windows


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
    ],
)
def test_the_context_is_as_long_as_the_scaling_carries(scaling: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert write(tmp_path, LLAMA | {"rope_scaling": scaling}).max_model_len == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DbrxForCausalLM"]}, "DbrxForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"head_dim": 7}, "head_dim is 7"),
        (QWEN2 | {"attention_bias": True}, "attention_bias"),
        (MISTRAL | {"mlp_bias": True}, "mlp_bias"),
        (MISTRAL | {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (QWEN3 | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_unserved_models_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        write(tmp_path, LLAMA | change)
    assert named in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("change", "way_on"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"Llama 2 and 3, Mistral, Qwen2"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quant_method 'aqlm'.*dequantize\(\)"),
        ({"quantization_config": {}}, "quant_method None.*the checkpoint that it was made from"),
    ],
)
def test_unserved_models_come_with_a_fix(change: dict[str, Any], way_on: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=way_on):
        write(tmp_path, LLAMA | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"num_hidden_layers": 0}, "a whole number from 1"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "6 heads cannot share"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"architectures": "LlamaForCausalLM"}, "a list of strings"),
        ({"eos_token_id": 128}, "outside the vocabulary of 128"),
        ({"eos_token_id": [2, "x"]}, "a token id or a list of them"),
        ({"rope_scaling": 4}, "'rope_scaling' is 4"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "a list of 4 numbers",
        ),
        (QWEN2 | {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is not true"),
    ],
)
def test_contradictory_fields_name_file_field_and_value(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        write(tmp_path, LLAMA | change)
    assert named in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message


GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 7, "intermediate_size": 48}


def test_absent_fields_have_the_familys_defaults(tmp_path: Path) -> None:
    """Gemma 3's published files leave out transformers' defaults."""
    config = write(tmp_path, GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 5})
    assert (config.head_dim, config.num_heads, config.num_kv_heads, config.vocab_size) == (256, 8, 4, 262208)
    assert config.tied_embeddings
    assert config.windows == (5,) * 5 + (None, 5)
    assert config.ropes == (Rope(theta=1e4),) * 5 + (LinearRope(theta=1e6, factor=8.0), Rope(theta=1e4))
    assert config.max_model_len == 131072
    assert config.scales.embedding == 32**0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"hidden_activation": "relu6"}, "hidden_activation is 'relu6'"),
        (LLAMA | {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True}, "attention_out_bias is True"),
        (LLAMA | {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        (LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "'no_rope_layers' is [1, 2]"),
        (
            LLAMA | {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.01},
            "'partial_rotary_factor' is 0.01",
        ),
        (
            LLAMA | {"architectures": ["Cohere2ForCausalLM"], "layer_types": ["full_attention"]},
            "1 entries for 4 layers",
        ),
        (LLAMA | {"architectures": ["Olmo2ForCausalLM"], "sliding_window": 4}, "sliding_window"),
    ],
)
def test_unsupported_fields_of_a_family_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as caught:
        write(tmp_path, change)
    assert named in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message


def test_fields_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    harmless = {
        "use_cache": False,
        "attention_dropout": 0.1,
        "pretraining_tp": 4,
        "num_experts": 0,
        "is_encoder_decoder": False,
    }
    assert write(tmp_path, LLAMA | harmless).family == "llama"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "says"), [('{"vocab_size": 1', "not valid JSON"), ("[1]", "a JSON object"), ("[" * 9999, "not valid JSON")]
)
def test_a_damaged_file_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(text)
    with pytest.raises(BadCheckpoint, match=says) as caught:
        read_config(tmp_path)
    assert str(tmp_path / name) in caught.value.message


def test_an_invalid_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"there is no folder or file .*absent: give --model"):
        read_config(tmp_path / "absent")
    with pytest.raises(BadCheckpoint, match=r"has no config\.json, so it is no checkpoint's folder"):
        read_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(BadCheckpoint, match=r"model\.gguf: the header takes 4 bytes.*truncated"):
            read_config(path)


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    write(
        tmp_path,
        LLAMA
        | {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168, "n_group": 1,
            "first_k_dense_replace": 1, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 384,
            "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "routed_scaling_factor": 2.827, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_hidden_layers": 61,
            "rope_scaling": {
                "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
            },
        },
    )  # fmt: skip
    config = read_config(tmp_path)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_sparse_layers, config.experts.routing.factor) == (
        384,
        60,
        2.827,
    )
    assert config.latent is not None
    assert config.latent.width == 576


def test_ministral_3_as_mistral_published_it(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1}  # fmt: skip
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "eos_token_id")}
    text |= {"model_type": "ministral3", "max_position_embeddings": 262144, "sliding_window": None, "head_dim": 8}
    config = write(
        tmp_path,
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": text | {"rope_parameters": rope},
            "vision_config": {"model_type": "pixtral"},
            "quantization_config": {
                "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
                "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
            },
        },
        {"eos_token_id": 2},
    )  # fmt: skip
    assert (config.family, config.max_model_len, config.windows) == ("ministral3", 262144, (None,) * 4)
    assert config.scales.growth == QueryGrowth(beta=0.1, length=16384)
    assert isinstance(config.rope, YarnRope)
    assert config.rope.magnitude == 1.0
    assert config.weight_format is not None
    assert config.weight_format.settings == FP8Settings(block=None, static=True)
    with pytest.raises(UnsupportedModel, match=r"llama_4_scaling_beta is 0\.1.*llama"):
        write(tmp_path, LLAMA | {"rope_parameters": rope})
