"""Models whose every kernel and attention are the CUDA backend's choose the oracle's tokens: the seams fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protos.values import SamplingParams
from tests.kernels.conftest import DEVICE
from tests.numerics.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kernels.base import kernels_for
from workers.kv.storage import KVStorage
from workers.models import loader
from workers.runner.runner import TorchRunner

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


# Of the families with experts one: in the interpreter each takes ten seconds.
_ELSEWHERE = {"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _ELSEWHERE])
def test_greedy_tokens_are_the_oracles(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_checkpoint(family, tmp_path)
    monkeypatch.setattr(loader, "kernels_for", lambda device: kernels_for("cuda"))
    decoder = loader.load_model(tmp_path, device=DEVICE)
    layout = decoder.config.kv_layout(block_size=BLOCK_SIZE, dtype="float32", tp=1)
    storage = KVStorage(layout, num_blocks=12, device=DEVICE)
    runner = TorchRunner(decoder, attention_for(storage, "cuda"), block_size=BLOCK_SIZE)
    long, short = Sequence("long", 33, 0), Sequence("short", 5, 6)
    steps = ([(long, 20)], [(long, 13), (short, 5)], [(short, 1), (long, 1)], [(short, 1), (long, 1)])
    for step in steps:
        output = runner.run(Batch(rows=tuple(sequence.next(count) for sequence, count in step)))
        for (sequence, _), row in zip(step, output.rows, strict=True):
            sequence.token_ids += row.token_ids
    for sequence in (long, short):
        with torch.inference_mode():
            logits = oracle(torch.tensor([sequence.token_ids[:-1]])).logits[0]
        assert sequence.token_ids[sequence.prompt_len :] == logits.argmax(-1)[sequence.prompt_len - 1 :].tolist()
