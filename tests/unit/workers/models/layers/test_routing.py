"""The choice of experts against its definition, written out for one token in plain Python, and against transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from workers.models.families.experts_config import ExpertRouting
from workers.models.layers.routing import route

MIXTRAL = ExpertRouting(num_experts=8, num_chosen=2, scoring="softmax", renormalised=True)
GROUPED = replace(MIXTRAL, num_chosen=3, num_groups=4, num_chosen_groups=2, renormalised=False, factor=1.5)
DEEPSEEK_V3 = ExpertRouting(
    num_experts=12, num_chosen=4, scoring="sigmoid", renormalised=True, epsilon=1e-20, factor=2.5,
    num_groups=4, num_chosen_groups=2, group_score="top-2", corrected=True,
)  # fmt: skip
RULES = {
    "mixtral": MIXTRAL,
    "one": replace(MIXTRAL, num_chosen=1, renormalised=False),
    "all": replace(MIXTRAL, num_chosen=8),
    "qwen": replace(MIXTRAL, num_chosen=3, renormalised=False),
    "deepseek-v2": GROUPED,
    "deepseek-v3": DEEPSEEK_V3,
    "glm-4": replace(DEEPSEEK_V3, num_groups=1, num_chosen_groups=1),
    "gpt-oss": ExpertRouting(num_experts=8, num_chosen=4, scoring="softmax-of-chosen", biased=True),
}


def by_definition(
    logits: list[float], routing: ExpertRouting, correction: list[float] | None
) -> tuple[list[int], list[float]]:
    if routing.scoring == "softmax":
        scores = [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits] if routing.scoring == "sigmoid" else logits
    choice = scores if correction is None else [score + more for score, more in zip(scores, correction, strict=True)]
    size = routing.num_experts // routing.num_groups

    def group_score(group: int) -> float:
        inside = sorted(choice[group * size : (group + 1) * size], reverse=True)
        return inside[0] if routing.group_score == "max" else inside[0] + inside[1]

    groups = sorted(range(routing.num_groups), key=lambda group: (-group_score(group), group))
    candidates = [expert for expert in range(len(logits)) if expert // size in groups[: routing.num_chosen_groups]]
    chosen = sorted(candidates, key=lambda expert: (-choice[expert], expert))[: routing.num_chosen]
    weights = [scores[expert] for expert in chosen]
    if routing.scoring == "softmax-of-chosen":
        weights = [math.exp(x) / sum(math.exp(y) for y in weights) for x in weights]
    if routing.renormalised:
        weights = [weight / (sum(weights) + routing.epsilon) for weight in weights]
    return chosen, [weight * routing.factor for weight in weights]


@pytest.mark.parametrize("name", RULES)
def test_the_choice_is_the_definitions(name: str) -> None:
    routing, generator = RULES[name], torch.Generator().manual_seed(5)
    logits = torch.randint(-3, 4, (300, routing.num_experts), generator=generator).float()
    correction = (
        torch.randint(-1, 2, (routing.num_experts,), generator=generator).float() if routing.corrected else None
    )
    ids, weights = route(logits, routing, correction)
    for token in range(len(logits)):
        corrections = None if correction is None else correction.tolist()
        chosen, expected = by_definition(logits[token].tolist(), routing, corrections)
        assert ids[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    routing, generator = RULES[name], torch.Generator().manual_seed(6)
    logits = torch.randn(40, routing.num_experts, generator=generator) * 3
    correction = torch.randn(routing.num_experts, generator=generator) if routing.corrected else None
    ids, weights = route(logits, routing, correction)
    for token in range(len(logits)):
        alone = route(logits[token : token + 1], routing, correction)
        assert torch.equal(alone[0][0], ids[token])
        assert torch.equal(alone[1][0], weights[token])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_logit_that_is_not_finite_breaks_its_token_alone(name: str, broken: float) -> None:
    routing = RULES[name]
    logits = torch.randn(3, routing.num_experts, generator=torch.Generator().manual_seed(7))
    correction = torch.zeros(routing.num_experts) if routing.corrected else None
    expected = route(logits, routing, correction)
    logits[1, 2] = broken
    ids, weights = route(logits, routing, correction)
    assert weights[1].isnan().all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < routing.num_experts
    for token in (0, 2):
        assert torch.equal(ids[token], expected[0][token])
        assert torch.equal(weights[token], expected[1][token])


@pytest.mark.parametrize(
    ("routing", "config_class", "router", "fields"),
    [
        (
            GROUPED,
            transformers.DeepseekV2Config,
            "deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter",
            {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        ),
        (
            DEEPSEEK_V3,
            transformers.DeepseekV3Config,
            "deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter",
            {"routed_scaling_factor": 2.5},
        ),
    ],
    ids=["deepseek-v2", "deepseek-v3"],
)
@torch.no_grad()
def test_groups_are_chosen_as_transformers_does(
    routing: ExpertRouting, config_class: type[Any], router: str, fields: dict[str, Any]
) -> None:
    module, _, name = router.rpartition(".")
    config = config_class(
        hidden_size=16, n_routed_experts=routing.num_experts, num_experts_per_tok=routing.num_chosen,
        n_group=routing.num_groups, topk_group=routing.num_chosen_groups, num_attention_heads=2, **fields,
    )  # fmt: skip
    oracle = getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)(config)
    torch.manual_seed(3)
    torch.nn.init.normal_(oracle.weight)
    correction = None
    if routing.corrected:
        torch.nn.init.normal_(oracle.e_score_correction_bias, std=0.3)
        correction = oracle.e_score_correction_bias
    x = torch.randn(64, 16)
    logits, weights, ids = oracle(x)
    ours = route(logits, routing, correction)
    order, our_order = ids.argsort(1), ours[0].argsort(1)
    assert torch.equal(ids.gather(1, order), ours[0].gather(1, our_order))
    torch.testing.assert_close(weights.gather(1, order), ours[1].gather(1, our_order))
