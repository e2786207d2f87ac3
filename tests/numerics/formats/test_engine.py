"""Quantised models in an engine, cold, cached and preempted: greedy tokens are those of the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.conftest import random_tokens
from tests.numerics.engines import GREEDY, answer, colocated, oracle_answers
from tests.numerics.formats.awq_encoder import awq
from tests.numerics.formats.bitsandbytes_encoder import nf4
from tests.numerics.formats.byte_encoder import in_bytes
from tests.numerics.formats.compressed_encoder import config_of, floats, integers, packed
from tests.numerics.formats.exl2_encoder import exl2
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import Encode, write_quantised
from tests.numerics.formats.test_gguf import convert_with_oracle
from workers.worker_config import WorkerConfig

Write = Callable[[Path], tuple[Path, Any]]
"""Into a folder: the model's path, and its oracle."""


def folder_of(family: str, encode: Encode, config: dict[str, Any], **options: Any) -> Write:
    return lambda folder: (folder, write_quantised(family, folder, encode, config, **options))


def file_of(family: str, kind: str, **overrides: Any) -> Write:
    return lambda folder: (
        folder / "model.gguf",
        convert_with_oracle(family, folder, kind, others={"attn_v": "Q4_0" if kind == "Q8_0" else "Q8_0"}, **overrides),
    )


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EXL2 = {"quant_method": "exl2", "version": "0.3.2", "bits": 4.25, "head_bits": 6}
INT4 = config_of("pack-quantized", integers(4, "group", 32))
FP8 = config_of("float-quantized", floats("channel"))
MODELS: dict[str, tuple[Write, int]] = {
    "gptq-qwen3": (folder_of("qwen3", gptq(act_order=True), gptq_config(desc_act=True), seed=2), 1),
    "gptq-qwen3-tp2": (folder_of("qwen3", gptq(act_order=True), gptq_config(desc_act=True), seed=2), 2),
    "awq-mistral-tp2": (folder_of("mistral", awq(), AWQ, **UNTIED), 2),
    "int4-llama-tied": (folder_of("llama", packed(), INT4, **TIED), 1),
    "fp8-qwen2-tp2": (folder_of("qwen2", in_bytes("fp8", "channel"), FP8, **UNTIED), 2),
    "nf4-qwen2-tied": (folder_of("qwen2", nf4(16), NF4, **TIED), 1),
    "exl2-llama-tp2": (folder_of("llama", exl2(), EXL2, head=True, **UNTIED), 2),
    "gguf-llama-tied-tp2": (file_of("llama", "Q4_0", **TIED), 2),
    "gguf-mistral": (file_of("mistral", "Q8_0"), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_oracles_cold_cached_and_preempted(name: str, tmp_path: Path) -> None:
    write, tp = MODELS[name]
    path, oracle = write(tmp_path)
    prompts = [random_tokens(length, seed=length) for length in (5, 20, 25)]
    expected = oracle_answers(oracle, prompts, 32)
    config = WorkerConfig(
        model=str(path), tp=tp, dtype="float32", prefill_chunk=16, num_blocks=6, max_model_len=64, free_windows=False
    )
    with colocated(config) as engine:
        for _ in range(2):
            answers = answer(engine, prompts, replace(GREEDY, max_tokens=32))
            assert [output.token_ids for output in answers] == expected
        assert engine.scheduler.num_preemptions > 0
