"""What a wire moves bytes with: something that sends to a rank and receives from one, as a process group does.

LaneConfig.transport   collective  ──▶ gloo for headers, gloo or NCCL for payloads     over any network
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from kvtransfer.config import LaneConfig
from kvtransfer.transports.store import BoardStore

# A CPU build of torch has not all of these classes.
_backends: Any = distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of a lane are here, at `store`. This one is `rank` of `size` and exchanges KV with `peer_ranks`."""

    store: BoardStore
    epoch: int
    rank: int
    size: int
    peer_ranks: tuple[int, ...]
    bind_host: str
    device: str
    config: LaneConfig

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """`control` carries headers and beats, `payloads` what they announce: both have the `send` and `recv` of a process
    group, and work that can be waited for. `transport` is how people know them."""

    control: Any
    payloads: Any
    transport: str


def open_collective(meeting: Meeting) -> Links:
    """Raises RuntimeError or OSError when the groups do not come about."""
    config = meeting.config
    options = _backends.ProcessGroupGloo._Options()
    options._devices = [_backends.ProcessGroupGloo.create_device(hostname=meeting.bind_host)]
    options._timeout = timedelta(seconds=config.stall_s)
    options._threads = 1
    store = PrefixStore(f"{meeting.epoch}/gloo", meeting.store)
    control = _backends.ProcessGroupGloo(store, meeting.rank, meeting.size, options)
    if not meeting.on_gpu:
        return Links(control=control, payloads=control, transport="gloo")
    store = PrefixStore(f"{meeting.epoch}/nccl", meeting.store)
    nccl = _backends.ProcessGroupNCCL(store, meeting.rank, meeting.size, _backends.ProcessGroupNCCL.Options())
    return Links(control=control, payloads=nccl, transport="nccl")
