"""From settings to a rank: what is resolved from the checkpoint and the machine, and what is refused at the start."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import BadCheckpoint, Misconfigured, UnsupportedModel, WorkerLost
from tests.numerics.checkpoints import MAX_POSITIONS
from tests.numerics.conftest import Checkpoint
from tests.numerics.engines import ranks_of
from workers.build_rank import LoadedRank, device_of, open_rank
from workers.cache import largest_batch
from workers.parallel.group import Solo
from workers.worker_config import WorkerConfig


def open_one(folder: object, **settings: Any) -> LoadedRank:
    return open_rank(WorkerConfig(**({"model": str(folder), "device": "cpu"} | settings)), Solo())


def test_unset_values_come_from_the_checkpoint(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("llama")
    rank = open_one(folder)
    assert rank.name == folder.name
    assert rank.layout.parts[0].dtype == "float32"
    assert rank.scheduler.max_model_len == MAX_POSITIONS
    assert rank.scheduler.eos_ids == (2,)
    assert rank.storage.block_bytes == rank.layout.block_bytes
    assert rank.storage.num_blocks == rank.scheduler.max_num_seqs * MAX_POSITIONS // 16, "every seat at full length"


def test_float16_checkpoints_are_served_in_bfloat16(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, oracle = checkpoint("llama")
    copy.deepcopy(oracle).half().save_pretrained(tmp_path)
    assert open_one(tmp_path).layout.parts[0].dtype == "bfloat16"
    assert open_one(tmp_path, dtype="float32").layout.parts[0].dtype == "float32"
    assert open_one(folder, served_name="mine").name == "mine"


def test_a_small_cache_lowers_the_longest_sequence_unless_it_is_set(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint("llama")
    assert open_one(folder, num_blocks=4).scheduler.max_model_len == 64
    [record] = caplog.records
    assert record.getMessage() == "max_model_len is lowered from 256 to 64: more does not fit the KV cache"
    assert record.name == "baton.worker", "other loggers do not reach the cluster's log"
    with pytest.raises(Misconfigured, match="max_model_len = 65: the KV cache holds 64"):
        open_one(folder, num_blocks=4, max_model_len=65)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_model_len": MAX_POSITIONS + 1}, "max_model_len"),
        ({"num_blocks": 2**40}, "num_blocks"),
        ({"memory_fraction": 1e-12}, "memory_fraction"),
    ],
)
def test_unserved_models_are_refused(checkpoint: Checkpoint, settings: dict[str, Any], param: str) -> None:
    folder, _ = checkpoint("llama")
    with pytest.raises(Misconfigured) as raised:
        open_one(folder, **settings)
    assert raised.value.param == param


def test_a_model_larger_than_memory_is_refused_before_reading(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint("llama")
    monkeypatch.setattr("workers.build_rank.free_ram_bytes", lambda: 1000)
    monkeypatch.setattr("workers.build_rank.load_served", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(Misconfigured, match="weights take"):
        open_one(folder)


def test_a_bad_folder_and_an_unknown_family_have_their_own_errors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint):
        open_one(tmp_path / "nothing")
    folder, _ = checkpoint("llama")
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel):
        open_one(tmp_path / "model")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Misconfigured, match="no GPU"):
        device_of(WorkerConfig(model="folder", device="cuda"))
    assert device_of(WorkerConfig(model="folder")) == "cpu"


def test_a_cache_in_ram_leaves_room_for_the_host_tier(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("llama")
    monkeypatch.setattr("workers.build_rank.free_ram_bytes", lambda: 2**26)
    rank = open_one(folder, host_kv_gib=60 / 2**10, memory_fraction=0.5)
    assert rank.storage.num_blocks * rank.storage.block_bytes <= 2**21
    with pytest.raises(Misconfigured, match="lower num_blocks, memory_fraction or host_kv_gib"):
        open_one(folder, host_kv_gib=60 / 2**10, num_blocks=2**23 // rank.storage.block_bytes)


def test_ranks_agree_on_the_smallest_cache(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("llama")
    free = iter([10**9, 3 * 10**6])
    monkeypatch.setattr("workers.build_rank.free_ram_bytes", lambda: 10**9)
    monkeypatch.setattr("workers.cache.blocks_in_ram", lambda *_, **__: next(free) // 10**5)
    with ranks_of(WorkerConfig(model=str(folder), tp=2, device="cpu")) as ranks:
        assert [rank.storage.num_blocks for rank in ranks] == [30, 30]
        assert {rank.storage.block_bytes for rank in ranks} == {ranks[0].layout.block_bytes // 2}


def test_a_rank_that_cannot_open_takes_the_others_with_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint("llama")
    blocks = iter([10])

    def poor(*_: Any, **__: Any) -> int:
        for block in blocks:
            return block
        raise Misconfigured("no memory here", param="memory_fraction")

    monkeypatch.setattr("workers.cache.blocks_in_ram", poor)
    with (
        pytest.raises((Misconfigured, WorkerLost)),
        ranks_of(WorkerConfig(model=str(folder), tp=2, device="cpu")),
    ):
        pass


def test_the_largest_step_equals_the_schedulers_largest(checkpoint: Checkpoint) -> None:
    """A GPU's cache is sized by running it, so it must use up the budget and the seats, and must run."""
    folder, _ = checkpoint("llama")
    settings: Any = {"max_num_batched_tokens": 300, "max_num_seqs": 20, "prefill_chunk": 100}
    config = WorkerConfig(model=str(folder), device="cpu", num_blocks=16, **settings)
    batch = largest_batch(config, MAX_POSITIONS)
    assert batch.num_tokens == 300
    assert [len(row.token_ids) for row in batch.rows] == [100, 100, 83] + [1] * 17
    assert all(row.start + len(row.token_ids) == MAX_POSITIONS for row in batch.rows)
    output = open_rank(config, Solo()).runner.run(batch)
    assert all(row.token_ids for row in output.rows)
