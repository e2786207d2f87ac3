"""Models whose every kernel and attention are the CUDA backend's choose the oracle's tokens: the seams fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.values import SamplingParams
from tests.kernels.conftest import DEVICE, ON_GPU
from tests.numerics.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.numerics.formats.gptq_encoder import gptq, gptq_config
from tests.numerics.formats.served import write_quantised
from tests.numerics.formats.test_experts import write_with_oracle
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kernels.device_kernels import QuantisedProduct, kernels_for
from workers.kernels.quantised import product_choice
from workers.kv.kv_storage import KVStorage
from workers.models import loader
from workers.models.decoder import Decoder
from workers.quantization.quantised_weight import QuantisedWeight
from workers.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.slow

BLOCK_SIZE = 8


class Sequence:
    """A prompt with blocks of its own, computed piece by piece."""

    def __init__(self, name: str, prompt_len: int, first_block: int) -> None:
        generator = torch.Generator().manual_seed(prompt_len)
        self.token_ids: list[int] = torch.randint(3, VOCAB_SIZE, (prompt_len,), generator=generator).tolist()
        self.prompt_len = prompt_len
        self._name = name
        self._block_ids = tuple(range(first_block, first_block + 6))
        self._done = 0

    def next(self, num_tokens: int) -> Row:
        start, self._done = self._done, self._done + num_tokens
        at_end = self._done == len(self.token_ids)
        sample = Sample(params=SamplingParams(temperature=0.0), index=len(self.token_ids) - self.prompt_len)
        return Row(
            request_id=self._name,
            token_ids=tuple(self.token_ids[start : self._done]),
            start=start,
            block_tables=(self._block_ids,),
            sample=sample if at_end else None,
            prompt_len=self.prompt_len,
        )


_SAME_KERNELS = {
    *("mistral", "qwen2", "phi3", "granite"),  # as llama
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"),  # as gpt_oss
    *("deepseek_v2", "glm4_moe_lite"),  # as deepseek_v3
}
"""In the interpreter a family takes seconds: these launch what another one launches, with other plain torch between."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _SAME_KERNELS])
def test_greedy_tokens_are_the_oracles(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_greedy_tokens(tmp_path, make_checkpoint(family, tmp_path), monkeypatch)


@pytest.mark.skipif(ON_GPU, reason="there float32 inputs are rounded to the type of matrix units")
def test_greedy_tokens_of_quantised_layers_are_the_oracles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the kernels of quantised weights: 4-bit GPTQ with act-order, in groups of 32."""
    oracle = write_quantised(
        "llama", tmp_path, gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True), tie_word_embeddings=True
    )
    packed = []

    def quantised_product(weight: QuantisedWeight) -> QuantisedProduct | None:
        packed.append(product_choice.quantised_product(weight))
        return packed[-1]

    monkeypatch.setattr(kernels_for("cuda"), "quantised_product", quantised_product)
    monkeypatch.setattr("workers.weights.formats.quantised_matrix.can_pack", lambda weight, dtype: False)
    assert_greedy_tokens(tmp_path, oracle, monkeypatch)
    assert packed
    assert all(packed)


@pytest.mark.skipif(ON_GPU, reason="there float32 inputs are rounded to the type of matrix units")
def test_greedy_tokens_of_quantised_experts_are_the_oracles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts of a layer are one product, so no step waits for the host."""
    oracle = write_with_oracle("mixtral", tmp_path, gptq(4, 32), gptq_config(4, 32), num_hidden_layers=1)
    monkeypatch.setattr(kernels_for("cuda"), "quantised_product", product_choice.quantised_product)
    monkeypatch.setattr("workers.weights.formats.quantised_matrix.can_pack", lambda weight, dtype: False)
    decoder = assert_greedy_tokens(tmp_path, oracle, monkeypatch, packed=True)
    assert not decoder.waits


def assert_greedy_tokens(
    tmp_path: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch, *, packed: bool = False
) -> Decoder:
    monkeypatch.setattr(loader, "kernels_for", lambda device: kernels_for("cuda"))
    decoder = loader.load_model(tmp_path, device=DEVICE)
    if packed:
        decoder.pack()
    layout = decoder.config.kv_layout(block_size=BLOCK_SIZE, dtype="float32", tp=1)
    storage = KVStorage(layout, num_blocks=12, device=DEVICE)
    runner = TorchRunner(decoder, attention_for(storage, "cuda"), block_size=BLOCK_SIZE)
    long, short = Sequence("long", 17, 0), Sequence("short", 3, 6)
    steps = ([(long, 10)], [(long, 7), (short, 3)], [(short, 1), (long, 1)], [(short, 1), (long, 1)])
    for step in steps:
        output = runner.run(Batch(rows=tuple(sequence.next(count) for sequence, count in step)))
        for (sequence, _), row in zip(step, output.rows, strict=True):
            sequence.token_ids += row.token_ids
    for sequence in (long, short):
        with torch.inference_mode():
            logits = oracle(torch.tensor([sequence.token_ids[:-1]])).logits[0]
        assert sequence.token_ids[sequence.prompt_len :] == logits.argmax(-1)[sequence.prompt_len - 1 :].tolist()
    return decoder
