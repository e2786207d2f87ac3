"""Decode steps replayed at padded sizes give the tokens that single steps give, and touch no block but their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protos.values import SamplingParams
from tests.kernels.conftest import DEVICE
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from workers.attention.registry import attention_for
from workers.batch import Batch, Row, Sample
from workers.kernels.device_kernels import kernels_for
from workers.kv.kv_storage import KVStorage
from workers.models import loader
from workers.runner.cuda_graphs import CudaRecorder, Recorder, why_eager
from workers.runner.torch_runner import TorchRunner

BLOCK_SIZE, BLOCKS_EACH = 8, 4
LENGTHS = (13, 3, 8)


class Again:
    """Stands where a GPU is missing: what it was given to record it calls again, with the tensors it was given then."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class Trial:
    """A model on the CUDA backend's kernels, and sequences that take part in the steps they are told to."""

    def __init__(self, folder: Path) -> None:
        self.decoder = loader.load_model(folder, device=DEVICE)
        layout = self.decoder.config.kv_layout(block_size=BLOCK_SIZE, dtype="float32", tp=1)
        self.storage = KVStorage(layout, num_blocks=len(LENGTHS) * BLOCKS_EACH + 1, device=DEVICE)
        self.runner = TorchRunner(self.decoder, attention_for(self.storage, "cuda"), block_size=BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        self.done = [0] * len(LENGTHS)

    def row(self, sequence: int, follows: int | None = None) -> Row:
        tokens, start = self.tokens[sequence], self.done[sequence]
        self.done[sequence] = len(tokens) + (follows is not None)
        return Row(
            request_id=str(sequence),
            token_ids=tuple(tokens[start:]),
            start=start,
            block_tables=(tuple(range(sequence * BLOCKS_EACH, (sequence + 1) * BLOCKS_EACH)),),
            sample=Sample(params=SamplingParams(temperature=0.0), index=len(tokens) - LENGTHS[sequence]),
            prompt_len=LENGTHS[sequence],
            depends_on_row=follows,
        )

    def serve(self, steps: list[tuple[int, ...]]) -> list[list[int]]:
        """Launches each step before fetching the last one."""
        previous: tuple[int, ...] = ()
        waiting = None
        for step in steps:
            rows = tuple(self.row(name, previous.index(name) if name in previous else None) for name in step)
            launched = self.runner.launch(Batch(rows=rows))
            if waiting is not None:
                self.add(previous, waiting.fetch())
            previous, waiting = step, launched
        assert waiting is not None
        self.add(previous, waiting.fetch())
        return self.tokens

    def add(self, step: tuple[int, ...], output: object) -> None:
        for sequence, row in zip(step, output.rows, strict=True):  # type: ignore[attr-defined]
            self.tokens[sequence] += row.token_ids


STEPS: list[tuple[int, ...]] = [(0, 1, 2), (2, 0, 1), (1,), (1,), (1, 0)]


@pytest.mark.parametrize("recorder", [Again, pytest.param(CudaRecorder, marks=pytest.mark.gpu)])
def test_replayed_steps_choose_the_same_tokens(
    recorder: Callable[[], Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("mistral", tmp_path, num_hidden_layers=1)  # with a window
    monkeypatch.setattr(loader, "kernels_for", lambda device: kernels_for("cuda"))
    eager, replayed = Trial(tmp_path), Trial(tmp_path)
    replayed.runner.capture(recorder(), max_rows=4, max_blocks=BLOCKS_EACH + 2)
    assert not replayed.storage.data.any(), "capturing wrote into the cache"
    assert replayed.serve(STEPS) == eager.serve(STEPS)
    graphs = replayed.runner.graphs
    assert graphs is not None
    assert (graphs.num_replayed, graphs.num_eager) == (len(STEPS) - 1, 1)
    torch.testing.assert_close(replayed.storage.data, eager.storage.data)
    assert not replayed.storage.data[:, :, -1].any(), "padding was written to the block that nobody has"


def test_graphs_of_weights_that_moved_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("mistral", tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(loader, "kernels_for", lambda device: kernels_for("cuda"))
    trial = Trial(tmp_path)
    trial.runner.capture(Again(), max_rows=4, max_blocks=BLOCKS_EACH + 2)
    trial.serve([(1,)])
    trial.decoder.pack()
    with pytest.raises(AssertionError, match="weights have moved"):
        trial.serve([(1,)])


def test_a_rope_that_varies_says_why_it_is_not_captured(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    make_checkpoint("llama", tmp_path, max_position_embeddings=64, rope_parameters=rope)
    assert "rope" in why_eager(loader.load_model(tmp_path, device="cpu"))
    plain = tmp_path / "plain"
    make_checkpoint("llama", plain)
    assert why_eager(loader.load_model(plain, device="cpu")) == ""
