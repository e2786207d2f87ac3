"""The nodes of a Ray that is not ours, where Ray does not have them. Nothing here starts Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.config.cluster_config import RayConfig
from cluster.process.scratch_dir import Scratch
from cluster.ray import actors
from cluster.ray.actors import NodeActor, RayNodes
from cluster.ray.ray_session import Machines
from cluster.supervision.rank_starter import ended, kill_process
from protos.errors import Unavailable
from protos.values import ErrorInfo


@pytest.mark.parametrize("nodes", [[], ConnectionError("the GCS is away")])
async def test_a_machine_that_ray_does_not_have_is_unavailable(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def call(self: Machines, work: object) -> Any:
        if isinstance(nodes, Exception):
            raise nodes
        return nodes

    monkeypatch.setattr(Machines, "call", call)
    with pytest.raises(Unavailable):
        await RayNodes(Machines(RayConfig(), tmp_path), "run", 0.01).call("n1", "news", "d0.1.0")


@pytest.mark.parametrize(
    ("error", "num_actors"), [(RayTaskError("stop", "KeyError", KeyError()), 1), (ActorDiedError(), 2)]
)
async def test_an_actor_is_replaced_only_if_it_has_ended(
    error: Exception, num_actors: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []

    async def alive(self: RayNodes) -> list[tuple[str, str]]:
        return [("1", "n1")]

    async def stop(name: str) -> None:
        raise error

    def make(self: RayNodes, node_id: str) -> Any:
        made.append(SimpleNamespace(stop=SimpleNamespace(remote=stop)))
        return made[-1]

    monkeypatch.setattr(RayNodes, "_alive", alive)
    monkeypatch.setattr(RayNodes, "_make", make)
    nodes = RayNodes(Machines(RayConfig(), tmp_path), "run", 0.01)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await nodes.call("n1", "stop", "d0.1.0")
    assert len(made) == num_actors


async def test_a_rank_without_a_link_cannot_be_stopped() -> None:
    answer = await NodeActor("run", 60.0).stop("d0.1.0")
    assert isinstance(answer, ErrorInfo)
    assert answer.code == "unavailable"


ACTOR = """
import asyncio, os
from cluster.ray.actors import NodeActor
print(asyncio.run(NodeActor("run", 60.0).start("d0.1.0", {}, "")), flush=True)
os._exit(9)
"""


async def test_the_folder_of_living_ranks_stays_while_ray_is_away() -> None:
    """A second `baton` removed their sockets and locks: no supervisor found them again."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        environ = os.environ | {"TMPDIR": parent}
        niced = ("nice", "-n", "15", sys.executable, "-c", ACTOR)  # as Ray starts it
        actor = await asyncio.create_subprocess_exec(*niced, stdout=subprocess.PIPE, env=environ)
        told, _ = await actor.communicate()
        folder, pid = Path(parent) / "baton-run-node", int(told)
        assert os.geteuid() or os.getpriority(os.PRIO_PROCESS, pid) == 0, "a rank starves"
        Scratch(Path(parent)).remove()
        assert (folder / "d0.1.0.s").is_socket()
        kill_process(folder, "d0.1.0", pid)
        await ended(pid)
        Scratch(Path(parent)).remove()
        assert not folder.exists()


async def test_a_folder_open_to_others_is_a_readable_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(actors, "short_folder", lambda: tmp_path)
    folder = tmp_path / "baton-run-node"
    folder.mkdir(mode=0o755)
    actor = NodeActor("run", 60.0)
    for answer in (await actor.start("d0.1.0", {}, ""), await actor.attach("d0.1.0", os.getpid())):
        assert isinstance(answer, ErrorInfo)
        assert answer.code == "misconfigured"
        assert answer.message == f"{folder} must be a folder that only this user may use: remove it"
