"""The adapters of an engine by name. Pure: the matrices are the ranks' (`workers.adapters.linear`).

load(name, path) ─▶ served ── load of other files under the name ─▶ replaced: takes the requests on their way to it
                      └── unload(name) ─▶ retired ◀── the next order ──┘
                                             └── its last request ends ─▶ its memory is free
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from protos.errors import AdapterNotLoaded, NotFound
from protos.hints import listed
from protos.values import Adapter, AdapterList
from workers.adapters.names import check_name

if TYPE_CHECKING:
    from workers.adapters.adapter_files import AdapterFiles
    from workers.adapters.linear import AdapterTable


class ServedAdapters:
    """Lives on the engine's thread, except `check`. `ranks` are the tables of all ranks, whose checks are those of rank
    0 alone; `model` is the model's own name."""

    def __init__(self, ranks: AdapterTable, model: str) -> None:
        self._ranks = ranks
        self._model = model
        self._by_name: dict[str, Adapter] = {}
        self._replaced: set[str] = set()
        self._retired: set[str] = set()
        self.listener: Callable[[AdapterList], None] = lambda adapters: None

    @property
    def served(self) -> AdapterList:
        return AdapterList(adapters=tuple(self._by_name.values()))

    def check(self, name: str, path: str) -> AdapterFiles:
        """Raises InvalidRequest for a name, and as `read_adapter` for files that cannot be served. Callable from any
        thread: it may read for seconds."""
        check_name(name, self._model)
        return self._ranks.check(path)

    def load(self, name: str, files: AdapterFiles) -> Adapter:
        """Serves a checked adapter under this name and replaces an earlier one. Raises as `AdapterTable.check_room` and
        `load_adapter`."""
        self._ranks.check_room(files)
        path = str(files.folder)
        loaded = self._ranks.load_adapter(path, files.adapter_id)
        before = self._by_name.get(name)
        adapter = Adapter(
            adapter_id=loaded.adapter_id, name=name, path=path, rank=loaded.rank, num_bytes=loaded.num_bytes
        )
        self._by_name[name] = adapter
        if before is not None:
            self._replaced.add(before.adapter_id)
        self._replaced -= self._served_ids()
        self._retired -= self._served_ids()
        self.listener(self.served)
        return adapter

    def unload(self, name: str) -> None:
        """Accepts no new requests for the adapter. Raises NotFound."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            there_are = f"there are {listed(sorted(self._by_name))}" if self._by_name else "there are none"
            raise NotFound(f"no adapter {name!r} is loaded: {there_are}", param="name")
        self._retired |= {adapter.adapter_id} - self._served_ids()
        self.retire_replaced()
        self.listener(self.served)

    def require(self, adapter_id: str) -> None:
        """Raises AdapterNotLoaded."""
        if adapter_id not in self._served_ids() | self._replaced:
            raise AdapterNotLoaded("the request's adapter is not loaded on this worker, or not any more")

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def free(self, used: Collection[str]) -> None:
        """Frees retired adapters that no request has; `used` are the ids of all requests' adapters."""
        for adapter_id in self._retired.difference(used):
            self._retired.discard(adapter_id)
            self._ranks.unload_adapter(adapter_id)

    def retire_replaced(self) -> None:
        """Retires replaced adapters: the next order shows that no more requests are on their way to them."""
        self._retired |= self._replaced
        self._replaced.clear()

    def _served_ids(self) -> set[str]:
        return {adapter.adapter_id for adapter in self._by_name.values()}
