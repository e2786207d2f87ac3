"""A decoding engine on a GPU waits only when it fetches ids: what torch calls a synchronisation is an error here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protos.values import GenerateRequest, SamplingParams
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.engines import colocated
from workers.batch import Batch, PendingStep
from workers.worker_config import WorkerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, logprobs=5, min_tokens=40, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logit_bias=((4, 2.0),), max_tokens=40, ignore_eos=True),
)


@pytest.fixture
def _no_waiting_left_behind() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting_left_behind")
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_launch_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    make_checkpoint("llama", tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cuda", num_blocks=64, max_num_seqs=8, cuda_graphs=cuda_graphs)
    with colocated(config) as engine:
        for index, sampling in enumerate(SAMPLINGS):
            engine.submit(GenerateRequest(request_id=str(index), prompt_ids=(5, 6, 7), sampling=sampling), now=0.0)
        for _ in range(10):  # kernels are compiled, pinned memory is there
            engine.step(0.0)
        pipeline = engine._pipeline
        launch = pipeline.launch

        def strict(batch: Batch) -> PendingStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(pipeline, "launch", strict)
        while engine.has_work():
            engine.step(0.0)
