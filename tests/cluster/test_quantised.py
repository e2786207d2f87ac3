"""Quantised checkpoints in two pools of different tensor parallelism; `baton serve` of one is in test_serve.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.test_disaggregated import PROMPTS, config_for, pair_of
from tests.numerics.engines import oracle_answers
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import write_quantised
from tests.numerics.formats.test_gguf import convert_with_oracle

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("form", ["gptq", "gguf"])
async def test_pools_of_different_tensor_parallelism_match_the_oracle(form: str, tmp_path: Path) -> None:
    """Cold, then from what the workers have cached."""
    if form == "gptq":
        path, ranks = tmp_path, (2, 1)
        oracle = write_quantised("qwen3", tmp_path, gptq(act_order=True), gptq_config(desc_act=True))
    else:
        path, ranks = tmp_path / "model.gguf", (1, 2)
        oracle = convert_with_oracle("llama", tmp_path, "Q4_0", others={}, tie_word_embeddings=True)
    prompts = PROMPTS[3:6]
    expected = await asyncio.to_thread(oracle_answers, oracle, prompts)
    first, second = (config_for(path, tp=tp) for tp in ranks)
    async with pair_of(tmp_path, first, second) as pair:
        assert await pair.answers(prompts) == expected
        assert await pair.answers(prompts) == expected
        assert (await pair.stats("decode-0")).load.transfer_bytes > 0
