"""Payloads over NCCL, by a group that outlives its peers: the thread that moves bytes detects faults by itself.

torch gives each NCCL group a watchdog. When a peer dies in the middle of a transfer that ends the whole process, in a
minute (TORCH_NCCL_ASYNC_ERROR_HANDLING) or some more (TORCH_NCCL_DUMP_ON_TIMEOUT): right for ranks of one model, wrong
for a worker whose neighbour died. With TORCH_NCCL_BLOCKING_WAIT a group has neither of these threads (docs/adr/0020)::

    operation ─▶ over? ── yes, and it was not aborted ──────────────▶ the bytes are there
                   │ ▲
                   └─┴─ NCCL failed, a rank has gone, aborted, too late ─▶ RuntimeError ─▶ close: aborted

Kernels of an aborted communicator are over, too, and have moved nothing: so an aborted group reports no operation as
done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from kvtransfer.transports.links.links import LinkWork, Meeting
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousStore

_POLL_S = 0.0002
_LOOK_S = 0.1
_GREETING_TAG = 4

_backends: Any = distributed  # a CPU build of torch has no class for NCCL


def keep_no_watchdog() -> None:
    """Turns the watchdog off for groups that this process makes later. Call it before its threads start, and after the
    worker's own group of ranks is made: that group must end the process when a rank dies, and waits on streams only."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"


def open_nccl(meeting: Meeting, timeout: timedelta) -> NcclGroup:
    """Opens a group; all ranks of the lane call it at the same time. Each greets its peers, because NCCL makes a
    communicator at the first message between two ranks. Raises RuntimeError or OSError."""
    options = _backends.ProcessGroupNCCL.Options()
    options._timeout = timeout
    at, store, epoch = meeting.at, meeting.store, meeting.epoch
    made = _backends.ProcessGroupNCCL(PrefixStore(f"{epoch}/nccl", store), at.rank, at.size, options)
    group = NcclGroup(made, lambda: require_here(store, epoch))
    greeting_B = torch.zeros(1, dtype=torch.uint8, device=at.device)
    try:
        for peer in at.peer_ranks:
            (group.send if at.sends else group.recv)([greeting_B], peer, _GREETING_TAG).wait(timeout)
    except BaseException:
        group.close()
        raise
    return group


def require_here(store: RendezvousStore, epoch: int) -> None:
    """Raises RuntimeError when a rank of the lane has died or left it, or when the rendezvous server is gone."""
    try:
        if store.check([gone := f"{epoch}/gone"]):
            raise RuntimeError(f"{store.get(gone).decode()} hung up")
        if store.add("epoch", 0) != epoch:
            raise RuntimeError("another rank has left this lane")
    except OSError as error:
        raise RuntimeError(f"the destination's rendezvous server is gone: {error}") from error


class NcclGroup:
    """A group with the interface of a process group. A waiting thread calls `look` now and then, which raises to end
    the wait.

    `abort` may be called from any thread, and makes all that waits fail; `close` from one that does not wait here."""

    def __init__(self, group: Any, look: Callable[[], None]) -> None:
        self._group = group
        self._severed = threading.Event()
        self.look = look

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        return self._begin(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LinkWork:
        return self._begin(self._group.recv, tensors, rank, tag)

    def _begin(self, operation: Callable[..., Any], *arguments: object) -> LinkWork:
        self.require_whole()
        return LinkWork(partial(self._wait, operation(*arguments)))

    def require_whole(self) -> None:
        if self._severed.is_set():
            raise RuntimeError("the lane was aborted")

    def abort(self) -> None:
        self._severed.set()

    def close(self) -> None:
        self.abort()
        self._group.abort()

    def _wait(self, work: Any, timeout_s: float) -> None:
        now = time.monotonic()
        deadline_s, next_look_s = now + timeout_s, now + _LOOK_S
        while not work.is_completed():
            self.require_whole()
            now = time.monotonic()
            if now > deadline_s:
                raise RuntimeError(f"the transfer did not end within {timeout_s:g} s")
            if now > next_look_s:
                self.look()
                next_look_s = time.monotonic() + _LOOK_S
            time.sleep(_POLL_S)
        self.require_whole()
        work.wait()  # raises the error of the work
