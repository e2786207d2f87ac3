"""The LoRA adapters of a fleet: names for clients, the workers with the files, and orders to change both."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import PurePath
from typing import Protocol

from protos.errors import BatonError, InvalidRequest, Misconfigured, NotFound, NoWorkers
from protos.values import Adapter, WorkerInfo
from router.jobs import AdapterReport
from router.routing.candidate_columns import WorkerSet

log = logging.getLogger("baton.router")


class AdapterHost(Protocol):
    async def load_adapter(self, name: str, path: str) -> Adapter: ...
    async def unload_adapter(self, name: str) -> None: ...


class FleetAdapters:
    """`num_jobs` counts jobs by the adapter's name."""

    def __init__(self) -> None:
        self._ordered: dict[str, str] = {}  # paths by name; "" for an unloaded adapter
        self.num_jobs: Counter[str] = Counter()
        self.by_name: Mapping[str, Adapter] = {}
        self._workers: dict[str, set[str]] = {}  # by the adapter's id
        self._replaced: dict[str, str] = {}  # the former id by name

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """Reads the adapters of the connected workers. Without a worker the names stay: requests wait for one."""
        infos = tuple(workers)
        self._workers = {}
        adapters_by_name: dict[str, Counter[Adapter]] = {}
        for info in infos:
            for adapter in info.adapters:
                self._workers.setdefault(adapter.adapter_id, set()).add(info.worker_id)
                adapters_by_name.setdefault(adapter.name, Counter())[adapter] += 1
        if infos:
            before = self.by_name
            self.by_name = {
                name: max(adapters, key=lambda adapter: (len(self._workers[adapter.adapter_id]), adapter.adapter_id))
                for name, adapters in sorted(adapters_by_name.items())
            }
            for name, adapter in self.by_name.items():
                if name in before and before[name].adapter_id != adapter.adapter_id:
                    self._replaced[name] = before[name].adapter_id
                if (
                    old := self._replaced.get(name)
                ) is not None:  # requests for the old adapter are still accepted where it was loaded
                    self._workers.setdefault(old, self._workers[adapter.adapter_id])

    def learn(self, before: Iterable[Adapter], now: Iterable[Adapter]) -> None:
        had, has = ({adapter.name: adapter.path for adapter in adapters} for adapters in (before, now))
        self._ordered |= {name: path for name, path in has.items() if had.get(name) != path}
        self._ordered |= dict.fromkeys(had.keys() - has.keys(), "")

    def places(self, adapter_id: str, workers: WorkerSet) -> list[int]:
        having = self._workers.get(adapter_id, ())
        return [place for place, worker_id in enumerate(workers.worker_ids) if worker_id in having]

    def num_workers(self, adapter: Adapter) -> int:
        return len(self._workers.get(adapter.adapter_id, ()))

    def count(self, adapter_id: str) -> None:
        name = next((name for name, adapter in self.by_name.items() if adapter.adapter_id == adapter_id), "")
        self.num_jobs[name] += 1

    async def load(self, name: str, path: str, hosts: Mapping[str, AdapterHost]) -> AdapterReport:
        """Loads an adapter on these workers (`FleetView.load_adapter`), one by one until it succeeds once: bad files
        may crash a worker."""
        outcomes = dict[str, Adapter | BatonError | None]()
        for worker_id, host in hosts.items():
            outcomes[worker_id] = await _outcome(host.load_adapter(name, path))
            if isinstance(outcomes[worker_id], Adapter):
                break
        others = {
            worker_id: host.load_adapter(name, path) for worker_id, host in hosts.items() if worker_id not in outcomes
        }
        outcomes |= await _everywhere(others) if others or not hosts else {}
        done = {worker_id: outcome for worker_id, outcome in outcomes.items() if isinstance(outcome, Adapter)}
        failed = {worker_id: outcome for worker_id, outcome in outcomes.items() if isinstance(outcome, BatonError)}
        if not done:
            worker_id, error = next(iter(failed.items()))
            if isinstance(error, Misconfigured):  # a mistake of the order, not of the settings that serve
                raise InvalidRequest(f"{worker_id}: {error.message}", param=error.param) from error
            raise error
        self._ordered[name] = path
        for worker_id, error in failed.items():
            log.warning("worker %s did not load the adapter %s: %s", worker_id, name, error.message)
        return AdapterReport(done=done, failed={worker_id: error.message for worker_id, error in failed.items()})

    async def unload(self, name: str, hosts: Mapping[str, AdapterHost]) -> AdapterReport:
        outcomes = await _everywhere({worker_id: host.unload_adapter(name) for worker_id, host in hosts.items()})
        failed = {worker_id: outcome for worker_id, outcome in outcomes.items() if isinstance(outcome, BatonError)}
        if name in self._ordered:
            self._ordered[name] = ""  # a worker that connects later must not load it
        if len(failed) == len(outcomes):
            raise next(
                (error for error in failed.values() if not isinstance(error, NotFound)), next(iter(failed.values()))
            )
        self._ordered[name] = ""
        return AdapterReport(
            done={worker_id: None for worker_id in outcomes if worker_id not in failed},
            failed={worker_id: error.message for worker_id, error in failed.items() if not isinstance(error, NotFound)},
        )

    async def catch_up(self, info: WorkerInfo, host: AdapterHost) -> None:
        have = {adapter.name: adapter.path for adapter in info.adapters}
        for name, path in tuple(self._ordered.items()):
            try:
                if not path and name in have:
                    await host.unload_adapter(name)
                elif path and have.get(name) != str(PurePath(path)):
                    await host.load_adapter(name, path)
            except BatonError as error:
                log.warning("worker %s lacks the adapter %s: %s", info.worker_id, name, error.message)


async def _everywhere(
    calls: Mapping[str, Coroutine[None, None, Adapter | None]],
) -> dict[str, Adapter | BatonError | None]:
    if not calls:
        raise NoWorkers("no worker is connected that could have an adapter")
    return dict(zip(calls, await asyncio.gather(*map(_outcome, calls.values())), strict=True))


async def _outcome(call: Coroutine[None, None, Adapter | None]) -> Adapter | BatonError | None:
    try:
        return await call
    except BatonError as error:
        return error
