"""Chooses a lane's links: the fastest that all of its ranks have proved to reach. Repeated whenever the lane opens.

    destination rank   opens a listener ── door/<rank> ──▶ store            admits, shows ─▶ verdict/<rank> ─▶ store
    source rank                        store ──▶ knocks ── came/... ──▶ proves         ─▶ verdict/<rank> ─▶ store

Host names prove nothing, so none is compared: a source shares the destination's memory if it can change it. Every rank
reads all verdicts, so all choose alike. A configured link that cannot be had is refused.
"""

from __future__ import annotations

import logging
import sys

from kvtransfer.transports.links.gloo import open_collective
from kvtransfer.transports.links.links import HEADER_TAG, Links, Meeting
from kvtransfer.transports.links.shm import (
    MAX_SLOT_BYTES,
    LinkBroken,
    ShmGroup,
    ShmLink,
    ShmListener,
    close_all,
    connect,
    prove,
)

log = logging.getLogger("baton.kvtransfer")

_YES = b"yes"
_OPEN = b"\x01"
_SHUT = b"\x00"


class TransportRefused(RuntimeError):
    """A transport that is set by name cannot be had. The message names it and the reason."""


def open_links(meeting: Meeting) -> Links:
    """Called by all ranks of a lane at the same time. Raises RuntimeError (TransportRefused among them) or OSError."""
    links: dict[int, ShmLink] = {}
    why_not = _why_not_even_try(meeting)
    try:
        links = _send_side(meeting, why_not) if meeting.at.sends else _receive_side(meeting, why_not)
    except LinkBroken as error:
        why_not = why_not or str(error)
    try:
        reasons, insisting = _verdicts(meeting, why_not)
    except BaseException:
        close_all(links.values())
        raise
    if not reasons:
        transport = "cuda-ipc" if meeting.at.on_gpu else "shm"
        group = ShmGroup(links, header_tag=HEADER_TAG)
        return Links(
            control=group,
            payloads=group,
            transport=transport,
            flush=group.flush,
            abort=group.abort,
            close=group.close,
        )
    close_all(links.values())
    if insisting:
        raise TransportRefused(f"transport is set to shm, which does not work here: {reasons[0]}")
    return open_collective(meeting, why=reasons[0])


def _why_not_even_try(meeting: Meeting) -> str:
    if meeting.at.config.transport == "collective":
        return "a worker's transport is set to collective"
    return "" if sys.platform == "linux" else f"{sys.platform} has no memfd"


def _receive_side(meeting: Meeting, why_not: str) -> dict[int, ShmLink]:
    store, epoch = meeting.store, meeting.epoch
    if why_not:
        store.set(f"{epoch}/door/{meeting.at.rank}", _SHUT + why_not.encode())
        return {}
    listener = ShmListener(meeting.at.device, min(MAX_SLOT_BYTES, meeting.at.config.message_bytes))
    try:
        store.set(f"{epoch}/door/{meeting.at.rank}", _OPEN + listener.notice)
        for source in meeting.at.peer_ranks:
            if (came := store.get(f"{epoch}/came/{source}/{meeting.at.rank}")) != _YES:
                raise LinkBroken(came.decode())
        return listener.accept(meeting.at.peer_ranks, meeting.at.config.stall_s)
    finally:
        listener.close()


def _send_side(meeting: Meeting, why_not: str) -> dict[int, ShmLink]:
    """Greets all peers before it waits for any, so that no ranks wait for each other in a circle."""
    store, epoch = meeting.store, meeting.epoch
    connections = {}
    links: dict[int, ShmLink] = {}
    try:
        for rank in meeting.at.peer_ranks:
            notice = store.get(f"{epoch}/door/{rank}")
            reason = why_not or ("" if notice.startswith(_OPEN) else notice.removeprefix(_SHUT).decode())
            if not reason:
                try:
                    connections[rank] = connect(notice.removeprefix(_OPEN), meeting.at.rank)
                except OSError as error:
                    reason = f"no memory in common: {error.strerror or error}"
            store.set(f"{epoch}/came/{meeting.at.rank}/{rank}", reason.encode() or _YES)
            why_not = why_not or reason
        if why_not:
            raise LinkBroken(why_not)
        for rank in meeting.at.peer_ranks:
            links[rank] = prove(connections.pop(rank), meeting.at.config.stall_s, meeting.at.device)
    except BaseException:
        close_all(links.values())
        raise
    finally:
        close_all(connections.values())
    return links


def _verdicts(meeting: Meeting, why_not: str) -> tuple[list[str], bool]:
    """Why shared memory is not used, by ranks that cannot have it, and whether a rank insists on it."""
    store, epoch = meeting.store, meeting.epoch
    store.set(f"{epoch}/verdict/{meeting.at.rank}", f"{meeting.at.config.transport} {why_not}".encode())
    verdicts = [store.get(f"{epoch}/verdict/{rank}").decode().partition(" ") for rank in range(meeting.at.size)]
    return [reason for _, _, reason in verdicts if reason], any(preference == "shm" for preference, _, _ in verdicts)
