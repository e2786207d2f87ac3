from __future__ import annotations

from dataclasses import replace

from protos.errors import BadCheckpoint
from protos.model_files.fields import Fields
from workers.models.families.experts_config import ExpertsConfig, glm4_experts
from workers.models.families.family import Family
from workers.models.families.latent_config import latent_scales, read_latent


def experts(config: Fields, num_layers: int) -> ExpertsConfig | None:
    """`mlp_layer_types` says which layers are sparse; without it all but the first are."""
    found, types = glm4_experts(config, num_layers), config.texts("mlp_layer_types")
    if found is None or not types:
        return found
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise BadCheckpoint(
            f"{config.where}: mlp_layer_types is {list(types)}: it must have dense or sparse for each of {num_layers} "
            "layers. Use the checkpoint's original file",
            param="mlp_layer_types",
        )
    return replace(found, sparse=tuple(one == "sparse" for one in types))


FAMILY = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    latent=read_latent,
    scales=latent_scales,
    experts=experts,
    reads=frozenset({"n_routed_experts"}),
    defaults={
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
    head_dim=64,
)
