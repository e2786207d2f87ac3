"""The nodes of a Ray that is not ours, where Ray does not have them. Nothing here starts Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster import actors
from cluster.actors import RayNodes
from cluster.config import RayConfig
from cluster.machines import Machines
from protos.errors import WorkerLost


@pytest.mark.parametrize("nodes", [[], ConnectionError("the GCS is away")])
async def test_a_machine_that_stays_away_is_given_up(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its worker stayed "starting" for ever."""

    async def call(self: Machines, work: object) -> Any:
        if isinstance(nodes, Exception):
            raise nodes
        return nodes

    monkeypatch.setattr(Machines, "call", call)
    monkeypatch.setattr(actors, "CONTACT_S", 0.0)
    with pytest.raises(WorkerLost, match=r"Ray has not had the machine n1 for 0.01 s"):
        await RayNodes(Machines(RayConfig(), tmp_path), "run", 0.01).at("n1")
