"""Quantised checkpoints through the whole of Baton: two pools of different tensor parallelism, and `baton serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.deployed import PRECISE, Deployed
from tests.cluster.test_disaggregated import PROMPTS, config_for, pair_of
from tests.numerics.engines import oracle_answers
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import write_quantised
from tests.numerics.formats.test_demo import FIRST_LINE, QUESTION, write_demo

pytestmark = pytest.mark.cluster


async def test_pools_of_different_tensor_parallelism_answer_as_the_oracle(tmp_path: Path) -> None:
    """Cold, then from what the workers have cached."""
    oracle = write_quantised("qwen3", tmp_path, gptq(act_order=True), gptq_config(desc_act=True))
    prompts = PROMPTS[3:6]
    expected = await asyncio.to_thread(oracle_answers, oracle, prompts)
    async with pair_of(tmp_path, config_for(tmp_path, tp=2), config_for(tmp_path)) as pair:
        assert await pair.answers(prompts) == expected
        assert await pair.answers(prompts) == expected
        assert (await pair.stats("decode-0")).load.transfer_bytes > 0


def test_a_quantised_folder_is_served(deploy: Callable[..., Deployed], tmp_path: Path) -> None:
    write_demo(tmp_path, gptq(4, 32), gptq_config(4, 32))
    flags = ("--served-name", "demo", "--workers", "1", "--port", "0", "--grpc-port", "0")
    baton = deploy("serve", "--model", str(tmp_path), *flags, *PRECISE)
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = httpx.post(f"{baton.url}/v1/chat/completions", json=asked, timeout=60.0).json()
    assert answer["choices"][0]["message"]["content"].startswith(FIRST_LINE)
    (worker,) = baton.status()["workers"]
    assert worker["info"]["weights"] == "gptq-int4-g32, 4.732 bits a weight"
    assert baton.stop() == 0, baton.log
