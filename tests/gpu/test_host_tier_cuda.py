"""On a GPU: what was evicted to pinned memory comes back bit for bit, beside steps that continue, and nobody waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from kvtransfer.hashing import chain_hashes
from protos.values import GenerateRequest, KVLayout, SamplingParams
from tests.numerics.checkpoints import make_checkpoint
from tests.numerics.conftest import random_tokens
from tests.numerics.engines import answer, colocated
from workers.batch import Batch, PendingStep
from workers.kv.host_copies import PIECE_BYTES, CudaCopies
from workers.kv.kv_storage import KVStorage
from workers.worker_config import WorkerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((100, 97, 120, 64))]
FEW = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def _no_waiting_left_behind() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def small(folder: Path, **settings: object) -> WorkerConfig:
    fields: dict[str, object] = {"num_blocks": 24, "max_model_len": 160, "host_kv_gib": 0.05, "prefill_chunk": 32}
    return WorkerConfig(model=str(folder), device="cuda", dtype="float32", **(fields | settings))  # type: ignore[arg-type]


def test_blocks_come_back_while_others_are_overwritten() -> None:
    """Several pieces each way; copied blocks are overwritten, and loaded ones read, at once."""
    layout = KVLayout.dense(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    storage = KVStorage(layout, num_blocks=600, device="cuda")
    assert 256 * storage.block_bytes > PIECE_BYTES
    copies = CudaCopies(storage, 400)
    storage.data.normal_()
    before = storage.data.cpu()
    gone, slots, back = range(256), range(399, 143, -1), range(300, 556)
    copies.offload(gone, slots)
    storage.data[:, :, :256] = 7.0
    copies.onload(1, slots, back)
    copies.offload(range(560, 600), range(40))
    copies.await_copy(1)
    after = storage.data.cpu()
    assert torch.equal(after[:, :, 300:556], before[:, :, :256])
    assert torch.equal(after[:, :, 556:], before[:, :, 556:])
    (loaded,) = copies.finished()
    assert (loaded.load_id, loaded.elapsed_s > 0) == (1, True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_small_cache_with_a_host_tier_answers_as_a_large_one(tmp_path: Path, depth: int) -> None:
    make_checkpoint("qwen3", tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = False
    with colocated(small(tmp_path, num_blocks=200, host_kv_gib=0.0)) as large:
        expected = [output.token_ids for output in answer(large, PROMPTS, FEW)]
    with colocated(small(tmp_path, steps_in_flight=depth)) as engine:
        for _ in range(6):
            assert [output.token_ids for output in answer(engine, PROMPTS, FEW)] == expected
        load = engine.load().host
        assert load is not None
        assert load.num_hit_tokens > 0


@pytest.mark.usefixtures("_no_waiting_left_behind")
def test_neither_plans_nor_launches_wait_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)
    with colocated(small(tmp_path)) as engine:
        for _ in range(3):  # kernels are compiled, pinned memory is there
            answer(engine, PROMPTS, FEW)
        pipeline, scheduler = engine._pipeline, engine.scheduler
        launch, plan = pipeline.launch, scheduler.plan

        def strict_launch(batch: Batch) -> PendingStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        def strict_plan(now: float, waiting: Collection[str]) -> Batch | None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return plan(now, waiting)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(pipeline, "launch", strict_launch)
        monkeypatch.setattr(scheduler, "plan", strict_plan)
        before = engine.load().host
        answer(engine, PROMPTS, FEW)
        after = engine.load().host
        assert before is not None
        assert after is not None
        assert after.num_stored + after.num_loaded > before.num_stored + before.num_loaded


def test_a_prompt_is_loaded_while_an_answer_goes_on(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with colocated(small(tmp_path)) as engine:
        prompt = tuple(PROMPTS[0])
        for tokens in (prompt, random_tokens(150, 7), random_tokens(150, 8), random_tokens(150, 9)):
            answer(engine, [tokens], FEW)
        assert engine.pool.match(chain_hashes(prompt, 16)) == []
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.submit(GenerateRequest(request_id="busy", prompt_ids=(5, 6, 7), sampling=long), now=0.0)
        for _ in range(4):
            engine.step(0.0)
        engine.submit(GenerateRequest(request_id="again", prompt_ids=prompt, sampling=FEW), now=0.0)
        cached = 0
        while engine.has_work():
            cached += sum(request.num_cached_tokens for request in engine.step(0.0) if request.request_id == "again")
            engine.check_integrity()
        engine.assert_idle()
        assert cached == 96
