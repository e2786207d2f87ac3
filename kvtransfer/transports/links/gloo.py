"""Links over any network: gloo for headers, gloo or NCCL for payloads. On GPUs that NCCL does not take, payloads go
over gloo, through pinned host memory.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from kvtransfer.transports.links.host_staged import HostStaged, nccl_card, why_no_nccl
from kvtransfer.transports.links.links import Links, Meeting
from kvtransfer.transports.links.nccl import NcclGroup, open_nccl
from kvtransfer.transports.links.staging_memory import Staging

_SEVER_TAG = 3  # beside HEADER_TAG and PAYLOAD_TAG

# A CPU build of torch has not all of these classes.
_backends: Any = distributed


def open_collective(meeting: Meeting, why: str = "") -> Links:
    """Raises RuntimeError or OSError when the groups do not come about."""
    config = meeting.at.config
    options = _backends.ProcessGroupGloo._Options()
    options._devices = [_backends.ProcessGroupGloo.create_device(hostname=meeting.at.bind_host)]
    options._timeout = timedelta(seconds=config.stall_s)
    options._threads = 1
    store = PrefixStore(f"{meeting.epoch}/gloo", meeting.store)
    control = _backends.ProcessGroupGloo(store, meeting.at.rank, meeting.at.size, options)
    payloads: Any = control
    nccl: NcclGroup | None = None
    if meeting.at.on_gpu and (refused := _why_no_nccl(meeting)):
        payloads = HostStaged(control, Staging(device="cpu", max_bytes=config.max_staged_bytes, pinned=True))
        why = f"through host memory, for {refused}; {why}" if why else f"through host memory, for {refused}"
    elif meeting.at.on_gpu:
        payloads = nccl = open_nccl(meeting, options._timeout)

    def abort() -> None:
        """Times out an operation, which closes the context's connections and ends every wait on them at both ends: gloo
        has no abort."""
        if nccl is not None:
            nccl.abort()
        for rank in meeting.at.peer_ranks:
            with contextlib.suppress(RuntimeError):  # an intended end, or it was broken before
                never = control.recv([torch.empty(1, dtype=torch.uint8)], rank, _SEVER_TAG)
                never.wait(timedelta(milliseconds=1))

    return Links(
        control=control,
        payloads=payloads,
        transport="gloo" if nccl is None else "nccl",
        flush=lambda timeout: None,
        abort=abort,
        close=(lambda: None) if nccl is None else nccl.close,
        why=why,
    )


def _why_no_nccl(meeting: Meeting) -> str:
    store, epoch = meeting.store, meeting.epoch
    store.set(f"{epoch}/card/{meeting.at.rank}", nccl_card(meeting.at.device))
    return why_no_nccl([store.get(f"{epoch}/card/{rank}").decode() for rank in range(meeting.at.size)])
