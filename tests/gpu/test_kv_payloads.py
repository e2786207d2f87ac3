"""Payloads cut out of a GPU's cache, beside the computation, are those of a CPU's. Left out where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvtransfer.reshard import Cut
from protos.values import KVLayout
from workers.kv.kv_storage import KVStorage

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout.dense(num_layers=3, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
WHOLE = Cut(block_ids=(5, 0, 3), unit=16, units=range(3), layers=range(3), pieces=(range(4),))
PARTS = Cut(block_ids=(5, 0), unit=8, units=range(1, 5), layers=range(1, 2), pieces=(range(1), range(2, 4)))


def memory(device: str, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("cut", [WHOLE, PARTS], ids=["whole blocks", "parts, beyond the last block"])
def test_payloads_equal_those_of_a_cpu(cut: Cut) -> None:
    values = torch.randn(3, 2, 6, 4, 16, 64).bfloat16()
    payloads = []
    for device in ("cpu", "cuda"):
        storage = KVStorage(LAYOUT, num_blocks=6, device=device)
        storage.data.copy_(values)
        with storage.aside(None):
            payload = storage.read(cut, partial(memory, device))
        storage.rejoin()
        storage.data.zero_()  # waits for what was read aside
        payloads.append(payload.cpu())
        storage.write(WHOLE, storage.read(WHOLE, partial(memory, device)))
    assert torch.equal(*payloads)


def test_earlier_writes_are_read_while_a_step_computes() -> None:
    storage = KVStorage(LAYOUT, num_blocks=6, device="cuda")
    values = torch.randn(3, 2, 6, 4, 16, 64, device="cuda").bfloat16()
    storage.data.copy_(values)
    storage.read(WHOLE, lambda num_bytes: memory("cuda", num_bytes))  # the kernel is compiled, and memory is there
    storage.mark()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # the step under way: about a second
    step = torch.cuda.Event()
    step.record()
    storage.mark()
    with storage.aside(1):
        payload = storage.read(WHOLE, lambda num_bytes: memory("cuda", num_bytes))
        read = torch.cuda.Event()
        read.record()
    read.synchronize()
    assert not step.query(), "the read waited for the step"
    storage.rejoin()
    torch.cuda.synchronize()
    assert torch.equal(
        payload.view(torch.bfloat16), storage.read(WHOLE, lambda n: memory("cuda", n)).view(torch.bfloat16)
    )


def test_a_read_waits_for_other_writes() -> None:
    """KV that has arrived is queued after the running step: its reader waits for both."""
    storage = KVStorage(LAYOUT, num_blocks=6, device="cuda")
    payload = storage.read(WHOLE, lambda num_bytes: memory("cuda", num_bytes)) + 1.0
    for _ in range(2):
        storage.mark()
    torch.cuda._sleep(500_000_000)
    storage.write(WHOLE, payload)
    with storage.aside(1):
        seen = storage.read(WHOLE, lambda num_bytes: memory("cuda", num_bytes))
    storage.rejoin()
    torch.cuda.synchronize()
    assert torch.equal(seen, payload)
