"""Blocks go to the host and back whole, on a CPU and by the way that a GPU takes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protos.errors import Misconfigured
from protos.values import KVLayout
from workers.cache import num_host_blocks_of
from workers.kv import host_copies
from workers.kv.host import HostCopies
from workers.kv.host_copies import CpuCopies, CudaCopies
from workers.kv.kinds import with_kv_dtype
from workers.kv.kv_storage import KVStorage
from workers.worker_config import WorkerConfig

LAYOUT = KVLayout.dense(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")


class AtOnce:
    """A stream, or an event, whose work is done when it is asked for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait(self, other: AtOnce) -> None:
        assert isinstance(other, AtOnce)

    wait_stream = wait_event = wait

    def record(self, stream: AtOnce | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: AtOnce) -> float:
        return 2.0


@pytest.fixture(params=[("cpu", "auto"), ("cuda", "auto"), ("cpu", "int8"), ("cuda", "int8"), ("cuda", "fp8")])
def copies(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[KVStorage, HostCopies]:
    device, kv_dtype = request.param
    storage = KVStorage(with_kv_dtype(LAYOUT, kv_dtype), num_blocks=12)
    if device == "cpu":
        return storage, CpuCopies(storage, 9)
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(
        host_copies,
        "_cuda",
        SimpleNamespace(
            Stream=AtOnce, Event=AtOnce, current_stream=AtOnce, stream=lambda _: nullcontext(),
            cudart=lambda: cudart, check_error=int,
        ),
    )  # fmt: skip
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 4 * storage.block_bytes)
    return storage, CudaCopies(storage, 9)


def test_blocks_come_back_as_they_were(copies: tuple[KVStorage, HostCopies]) -> None:
    storage, to_host = copies
    assert to_host.blocks_per_s > 0
    generator = torch.Generator().manual_seed(1)
    for tensor in storage.tensors:
        tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in storage.tensors]
    gone, slots, back = [11, 0, 5, 7, 2, 9], [3, 8, 0, 1, 7, 2], [1, 3, 11, 4, 0, 6]
    to_host.offload(gone, slots)
    for tensor, old in zip(storage.tensors, before, strict=True):
        assert torch.equal(tensor, old)
        tensor[:, :, gone] = 0
    to_host.onload(1, slots, back)
    (loaded,) = to_host.finished()
    to_host.await_copy(1)
    assert (loaded.load_id, loaded.elapsed_s > 0, to_host.finished()) == (1, True, [])
    untouched = [8, 10]
    for tensor, old in zip(storage.tensors, before, strict=True):
        assert torch.equal(tensor[:, :, back], old[:, :, gone])
        assert torch.equal(tensor[:, :, untouched], old[:, :, untouched])


def test_the_tier_has_as_many_slots_as_the_ranks_shares_fit() -> None:
    model_bytes = 2 * 3 * 2 * 4 * 4 * 2  # keys and values, layers, heads, dim, positions, bytes
    config = WorkerConfig(model="m", host_kv_gib=10 * model_bytes / 2**30)
    assert num_host_blocks_of(config, LAYOUT, 2**30) == 10
    one_head = KVLayout.dense(num_layers=3, num_kv_heads=1, head_dim=4, block_size=4, dtype="bfloat16", tp=2)
    assert num_host_blocks_of(config, one_head, 2**30) == 10, "each of two ranks has a copy of the head"
    assert num_host_blocks_of(WorkerConfig(model="m"), LAYOUT, 0) == 0
    with pytest.raises(Misconfigured, match="lower it"):
        num_host_blocks_of(config, one_head, 10 * model_bytes - 1)


@pytest.mark.parametrize("gib", [1e-9, 1e6])
def test_too_little_and_too_much_is_refused(gib: float) -> None:
    with pytest.raises(Misconfigured) as raised:
        num_host_blocks_of(WorkerConfig(model="m", host_kv_gib=gib), LAYOUT, 2**40)
    assert raised.value.param == "host_kv_gib"
    assert f"{gib:g}" in raised.value.message
