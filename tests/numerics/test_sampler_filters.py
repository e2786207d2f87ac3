"""Each filter of the sampler against the one transformers has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from protos.values import SamplingParams
from workers.batch import Sample
from workers.sampling.sampler import sample

VOCAB = 1500
NUM_DRAWS = 3000
HISTORY = (3, 17, 900, 3, 1499)

# In the order in which the sampler applies them.
FILTERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.4}, [TemperatureLogitsWarper(0.4)]),
    "top-k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top-p": ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    "min-p": ({"min_p": 0.08}, [MinPLogitsWarper(0.08)]),
    "repetition": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "all": (
        {"repetition_penalty": 0.6, "temperature": 1.4, "min_p": 0.02, "top_k": 30, "top_p": 0.8},
        [
            RepetitionPenaltyLogitsProcessor(0.6),
            TemperatureLogitsWarper(1.4),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.8),
        ],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_come_from_transformers_distribution(name: str) -> None:
    """Nothing outside its support, and every draw where its cumulative distribution puts it: the share of draws at
    or below each token differs from the oracle's by less than sampling noise allows (Kolmogorov, 0.1 %)."""
    settings, processors = FILTERS[name]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    theirs = LogitsProcessorList(processors)(torch.tensor([HISTORY]), logits.clone())
    probs = torch.softmax(theirs.double(), dim=-1)[0]
    params = SamplingParams(seed=11, **settings)
    rows = [
        Sample(params=params, index=index, prompt_ids=HISTORY[:2], output_ids=HISTORY[2:]) for index in range(NUM_DRAWS)
    ]
    tokens = torch.tensor([row.token_ids[0] for row in sample(logits.expand(NUM_DRAWS, -1), rows).fetch()])
    assert (probs[tokens] > 0).all()
    shares = torch.bincount(tokens, minlength=VOCAB).cumsum(0) / NUM_DRAWS
    assert (shares - probs.cumsum(0)).abs().max() < 1.95 / NUM_DRAWS**0.5
