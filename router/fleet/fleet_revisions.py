"""Which revision of model and settings each worker has, and which of them a request gets that begins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from kvtransfer.reshard import require_compatible
from protos.errors import IncompatibleWorkers
from protos.release import VERSION, WIRE
from protos.values import WorkerInfo, WorkerRole
from router.routing.candidate_columns import WorkerSet

OpenTexts = Callable[[WorkerInfo], Awaitable[str]]
"""Makes texts of the worker's revision readable. Returns what they have in common with those of other revisions: if it
is equal, one's token ids are the other's. Raises BatonError."""


class RevisedWorker(NamedTuple):
    """A worker's state for revisions. `takes_work`: it may get requests; `retiring`: only of those that have begun."""

    info: WorkerInfo
    takes_work: bool
    retiring: bool


class FleetRevisions:
    """Lives with the fleet, which calls `update` after each change. `current`: the latest request's revision; without
    workers that of waiting requests. `count`: how many revisions the workers have."""

    def __init__(self) -> None:
        self.current = ""
        self.count = 1
        self.open_texts: OpenTexts | None = None
        self._workers: dict[str, str] = {}
        self._shares: dict[str, float] = {}
        self._credits: dict[str, float] = {}
        self._texts: dict[str, str] = {}

    async def learn(self, info: WorkerInfo) -> None:
        """Makes a revision known before its first worker gets requests. Raises IncompatibleWorkers."""
        if self.open_texts is not None and info.revision not in self._texts:
            self._texts[info.revision] = await self.open_texts(info)

    def update(self, workers: Iterable[RevisedWorker]) -> None:
        revised = tuple(workers)
        self._workers = {worker.info.worker_id: worker.info.revision for worker in revised}
        self._shares = shares(revised)
        self.count = len(set(self._workers.values()) or ("",))
        self._credits = {revision: self._credits.get(revision, 0.0) for revision in self._shares}
        if self._shares and self.current not in self._shares:
            self.current = max(self._shares, key=self._shares.__getitem__)

    def begin(self) -> str:
        """The revision of a request that begins now. Requests are spread evenly, by the shares."""
        if len(self._shares) > 1:
            for revision, share in self._shares.items():
                self._credits[revision] += share
            self.current = max(self._credits, key=self._credits.__getitem__)
            self._credits[self.current] -= sum(self._shares.values())
        return self.current

    def serves_all(self, revision: str) -> bool:
        return self.count == 1 and revision in self._workers.values()

    def places(self, revision: str, workers: WorkerSet) -> list[int]:
        return [place for place, worker_id in enumerate(workers.worker_ids) if self._workers.get(worker_id) == revision]

    def is_gone(self, revision: str) -> bool:
        return bool(self._workers) and revision not in self._workers.values()

    def successor(self, revision: str) -> str | None:
        """A revision that can continue a request without an answer; None if its token ids mean something else there."""
        same = self._texts.get(revision, "") == self._texts.get(self.current, "")
        return self.current if same else None


def shares(workers: Sequence[RevisedWorker]) -> dict[str, float]:
    """The share of new requests of each revision, by its workers that write answers. A revision gets none while its
    workers retire or only another one has prefill workers, unless it is the last."""
    able = [worker for worker in workers if worker.takes_work]
    writing = [worker.info.revision for worker in able if worker.info.role is not WorkerRole.PREFILL]
    with_prefill = {worker.info.revision for worker in able if worker.info.role is WorkerRole.PREFILL}
    retiring = {worker.info.revision for worker in able if worker.retiring}
    revisions = dict.fromkeys(writing)
    for unfit in (retiring, set(revisions) - with_prefill if with_prefill else set[str]()):
        if set(revisions) - unfit:
            revisions = {revision: None for revision in revisions if revision not in unfit}
    return {revision: float(writing.count(revision)) for revision in revisions}


def check_joins(info: WorkerInfo, others: Sequence[WorkerInfo]) -> None:
    """Raises IncompatibleWorkers for a worker that cannot share requests with others of its revision, or that speaks
    another wire."""
    if info.wire != WIRE:
        raise IncompatibleWorkers(
            f"worker {info.worker_id} of Baton {info.version or 'before 0.1.0'} speaks wire {info.wire}, this gateway "
            f"of {VERSION} speaks wire {WIRE}: start both with versions of one wire (docs/upgrading.md)",
            param="wire",
        )
    others = [other for other in others if other.revision == info.revision]
    if not others:
        return
    reference = others[0]
    for name, theirs, ours in (
        ("model", info.model, reference.model),
        ("vocab_size", info.vocab_size, reference.vocab_size),
        ("device", info.device, reference.device),  # one lane's ranks are all on GPUs, or all on CPUs
    ):
        if theirs != ours:
            raise IncompatibleWorkers(
                f"worker {info.worker_id} has {name} {theirs}, but {reference.worker_id} has {ours}: "
                "start both with the same setting",
                param=name,
            )
    # Two layouts that fit the first one may not fit each other: blocks of 4, 8 and 12.
    for layout, worker_id in {other.layout: other.worker_id for other in others}.items():
        require_compatible(info.worker_id, info.layout, worker_id, layout)
