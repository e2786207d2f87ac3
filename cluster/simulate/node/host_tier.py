"""The host tier of a simulated worker: blocks are loaded over a link, one load after the other. Copies to the host take
no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.simulate.node.device import Device
from workers.kv.host import FinishedOnload


class HostMemory:
    """The `workers.kv.host.HostCopies` of one device."""

    def __init__(self, device: Device, *, page_s: float) -> None:
        self.blocks_per_s = 1 / page_s
        self._device = device
        self._page_s = page_s
        self._slots: dict[int, Any] = {}
        self._loads: dict[int, tuple[Sequence[int], Sequence[int], float]] = {}  # slots, blocks, end
        self._unreported: list[tuple[float, FinishedOnload]] = []
        self._link_free_s = 0.0

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._slots.update(zip(slots, self._device.content(block_ids), strict=True))

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        elapsed_s = len(slots) * self._page_s
        self._link_free_s = max(self._link_free_s, self._device.now_s) + elapsed_s
        self._loads[load_id] = (slots, block_ids, self._link_free_s)
        self._unreported.append((self._link_free_s, FinishedOnload(load_id=load_id, elapsed_s=elapsed_s)))

    def finished(self) -> Sequence[FinishedOnload]:
        over = [loaded for end_s, loaded in self._unreported if end_s <= self._device.now_s]
        del self._unreported[: len(over)]
        return over

    def await_copy(self, load_id: int) -> None:
        slots, block_ids, end_s = self._loads.pop(load_id)
        self._device.put(block_ids, [self._slots[slot] for slot in slots])
        self._device.wait_until(end_s)
