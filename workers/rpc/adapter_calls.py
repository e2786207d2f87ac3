"""Loading and unloading adapters on a running worker. Files are read and checked beside the engine; their matrices are
loaded between two steps, which wait for that."""

from __future__ import annotations

import asyncio

from protos.errors import InvalidRequest
from protos.values import Adapter
from workers.engine.engine import Engine
from workers.engine.served_adapters import ServedAdapters
from workers.rpc.loop import EngineLoop


class AdapterCalls:
    """Lives on the event loop. One adapter is loaded at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()

    async def load(self, loop: EngineLoop, name: str, path: str) -> Adapter:
        """Raises InvalidRequest, BadCheckpoint, UnsupportedModel or Misconfigured."""
        adapters = self._adapters()
        async with self._turn:
            files = await asyncio.to_thread(adapters.check, name, path)

            def order() -> Adapter:
                adapters.retire_replaced()
                self._engine.free_adapters()
                return adapters.load(name, files)

            return await loop.call(order)

    async def unload(self, loop: EngineLoop, name: str) -> None:
        """Raises NotFound."""
        adapters = self._adapters()

        def unload() -> None:
            adapters.unload(name)
            self._engine.free_adapters()

        await loop.call(unload)

    def _adapters(self) -> ServedAdapters:
        if self._engine.adapters is None:
            raise InvalidRequest("this worker serves no adapters")
        return self._engine.adapters
