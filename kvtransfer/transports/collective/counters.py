"""How one end's lanes have fared, by transport and by why it was not a faster one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from protos.values import LaneLoad


class LaneCounters:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], Counter[str]] = {}

    def opened(self, transport: str, why: str) -> None:
        with self._lock:
            self._counts.setdefault((transport, why), Counter()).update(num_open=1, num_opened=1)

    def ended(self, transport: str, why: str, *, lost: bool, stuck: bool, corrupt: bool) -> None:
        with self._lock:
            counts = self._counts[transport, why]
            counts["num_open"] -= 1
            if lost:
                counts.update(num_lost=1, num_stuck=int(stuck), num_corrupt=int(corrupt))

    def lane_loads(self) -> Sequence[LaneLoad]:
        with self._lock:
            return [LaneLoad(transport=key[0], reason=key[1], **counts) for key, counts in self._counts.items()]
