"""How the families' config.json describe their experts, and what is refused before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel
from protos.model_files.fields import Fields
from workers.models.families.experts_config import (
    ExpertRouting,
    ExpertsConfig,
    deepseek_v2_experts,
    deepseek_v3_experts,
    glm4_experts,
)
from workers.models.model_config import ModelConfig, check_parallel, read_config

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
MIXTRAL = BASE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2 = BASE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
QWEN3 = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
MINIMAX = BASE | {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
V2 = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GROUPED = V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def experts(folder: Path, config: dict[str, Any]) -> ExpertsConfig:
    spec = read(folder, config).experts
    assert spec is not None
    return spec


def test_each_family_routes_by_its_own_rule(tmp_path: Path) -> None:
    mixtral = experts(tmp_path, MIXTRAL)
    assert mixtral.routing == ExpertRouting(num_experts=5, num_chosen=2, scoring="softmax", renormalised=True)
    assert (mixtral.width, mixtral.sparse, mixtral.shared_width) == (48, (True,) * 4, 0)
    qwen2 = experts(tmp_path, QWEN2)
    assert qwen2.routing == ExpertRouting(num_experts=6, num_chosen=4, scoring="softmax")
    assert (qwen2.width, qwen2.shared_width, qwen2.shared_gated) == (12, 20, True)
    assert experts(tmp_path, QWEN3).routing == ExpertRouting(
        num_experts=16, num_chosen=8, scoring="softmax", renormalised=True
    )
    v2 = deepseek_v2_experts(Fields(GROUPED | {"routed_scaling_factor": 16.0}, "config.json"), 3)
    assert v2 is not None
    assert v2.routing == ExpertRouting(
        num_experts=8, num_chosen=2, scoring="softmax", factor=16.0, num_groups=4, num_chosen_groups=2
    )
    assert v2.shared_width == 24
    v3 = deepseek_v3_experts(Fields({"moe_intermediate_size": 12}, "config.json"), 5)
    assert v3 is not None
    assert v3.sparse == (False, False, False, True, True)
    assert (v3.routing.num_groups, v3.routing.num_chosen_groups, v3.routing.factor) == (8, 4, 2.5)
    assert v3.routing.corrected


def test_minimax_as_it_is_published(tmp_path: Path) -> None:
    """Its files have fields that transformers does not read."""
    published = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
                 "shared_intermediate_size": 0, "attn_type_list": [1] * 4, "rotary_dim": 8, "head_dim": 16}  # fmt: skip
    config = read(tmp_path, MINIMAX | published)
    assert (config.rotary_dim, config.rope.theta, config.qk_norm) == (8, 5e6, "all")
    for change in (
        {"scoring_func": "softmax"}, {"use_routing_bias": False}, {"shared_intermediate_size": 64},
        {"attn_type_list": [1, 0, 1, 1]}, {"sliding_window": 64}, {"rotary_dim": 17},
    ):  # fmt: skip
        with pytest.raises((UnsupportedModel, BadCheckpoint)) as refused:
            read(tmp_path, MINIMAX | published | change)
        assert [refused.value.param] == [*change]


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
    ],
)
def test_dense_layers_among_the_sparse_ones(change: dict[str, Any], sparse: tuple[bool, ...], tmp_path: Path) -> None:
    assert experts(tmp_path, QWEN3 | change).sparse == sparse


def test_a_mixture_of_no_experts_is_a_dense_model(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3 | {"num_experts": 0}).experts is None


def test_weights_of_the_experts_are_counted(tmp_path: Path) -> None:
    """Attention 4 x 32 x 32 a layer; a router, three matrices an expert, the shared expert and its gate; the head."""
    sparse = 32 * 6 + 3 * 32 * (6 * 12 + 20) + 32
    dense = 3 * 32 * 48
    config = read(tmp_path, QWEN2 | {"mlp_only_layers": [1]})
    assert config.num_linear_weights == 4 * 4 * 32 * 32 + 3 * sparse + dense + 128 * 32


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (MIXTRAL, {"num_experts_per_tok": 6}),
        (MIXTRAL, {"num_local_experts": 5000}),
        (MIXTRAL, {"num_local_experts": "8"}),
        (QWEN3, {"mlp_only_layers": [4]}),
        (QWEN3, {"mlp_only_layers": 3}),
        (QWEN3, {"decoder_sparse_step": 0}),
        (QWEN3, {"moe_intermediate_size": None}),
        (QWEN2, {"shared_expert_intermediate_size": None}),
    ],
)
def test_contradictory_fields_are_refused(config: dict[str, Any], change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(tmp_path, config | change)
    assert [caught.value.param] == [*change]
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (V2 | {"topk_method": "random"}, "topk_method"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2 | {"hidden_act": "gelu"}, "hidden_act"),
        (GROUPED | {"n_group": 3}, "n_group"),
        (GROUPED | {"topk_group": 5}, "topk_group"),
        (GROUPED | {"topk_group": 1, "num_experts_per_tok": 4}, "topk_group"),
    ],
)
def test_unserved_routings_are_refused_with_the_served_ones(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as refused:
        deepseek_v2_experts(Fields(fields, "config.json"), 4)
    assert refused.value.param == param


def test_a_group_needs_the_two_experts_that_are_its_score() -> None:
    fields = {"n_routed_experts": 4, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 2}
    with pytest.raises(BadCheckpoint) as refused:
        glm4_experts(Fields(fields | {"moe_intermediate_size": 12}, "config.json"), 4)
    assert refused.value.param == "n_group"


def test_ranks_share_columns_or_whole_experts(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3 | {"moe_intermediate_size": 6, "num_experts": 9})
    check_parallel(config, 2)
    with pytest.raises(Misconfigured, match=r"tp is 4.*expert size 6.*worker.expert_parallel"):
        check_parallel(config, 4)
    check_parallel(config, 4, expert_parallel=True)
    with pytest.raises(Misconfigured, match=r"tp is 4.*at most the number of experts 3"):
        check_parallel(read(tmp_path, MIXTRAL | {"num_local_experts": 3}), 4, expert_parallel=True)
