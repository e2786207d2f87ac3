"""Compute threads on cores of their own: topologies as sysfs tells them, made up here."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.supervision.rank import DRIVER_FILES
from protos.errors import Misconfigured
from workers.cores import NUM_SPINS, Core, Cores, claim_cores, read_cores
from workers.worker_config import WorkerConfig

HAS_GPU = any(path.exists() for path in DRIVER_FILES)


def machine(folder: Path, *, nodes: int, cores_of_node: int, threads_of_core: int) -> Path:
    """Hyperthreads are numbered as Linux does it: first one of every core, then the others."""
    num_cores = nodes * cores_of_node
    for cpu in range(num_cores * threads_of_core):
        core = cpu % num_cores
        topology = folder / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{core // cores_of_node}\n")
        (topology / "core_id").write_text(f"{core % cores_of_node}\n")
    for node in range(nodes):
        at = node * cores_of_node
        parts = [f"{at + n * num_cores}-{at + n * num_cores + cores_of_node - 1}" for n in range(threads_of_core)]
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(",".join(parts) + "\n")
    return folder


def test_a_core_counts_once_and_knows_its_node(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, nodes=2, cores_of_node=2, threads_of_core=2)
    assert [(core.cpu, core.node) for core in read_cores(range(8), sysfs)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [(core.cpu, core.node) for core in read_cores({4, 5, 3, 7}, sysfs)] == [(3, 1), (4, 0), (5, 0)]


def test_a_system_that_tells_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert [core.cpu for core in read_cores({0, 1, 5}, tmp_path)] == [0, 1, 5]


def test_ranks_take_cores_of_one_node_and_never_another_s(tmp_path: Path) -> None:
    cores = [Core(cpu=cpu, node=cpu // 4) for cpu in range(8)]
    ranks = [Cores(tmp_path / "cores") for _ in range(4)]
    assert [rank.claim(cores, 3) for rank in ranks[:2]] == [(0, 1, 2), (4, 5, 6)]
    assert ranks[1].near == (4, 5, 6, 7)
    assert ranks[2].claim(cores, 2) == (3, 7)  # no node has two left
    assert ranks[3].claim(cores, 1) == ()
    ranks[0].release()
    assert ranks[3].claim(cores, 4) == ()  # what it took in vain it leaves
    assert ranks[3].claim(cores, 3) == (0, 1, 2)
    for rank in ranks:
        rank.release()


def test_a_rank_that_stops_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    first, other = Cores(folder), Cores(folder)
    cores = [Core(cpu=cpu, node=0) for cpu in range(3)]
    first.claim(cores, 1)
    other.claim(cores, 2)
    first.release()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    other.release()
    assert not folder.exists()
    assert first.claim(cores, 3) == (0, 1, 2)
    first.release()


def test_a_killed_ranks_cores_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    folder.mkdir()
    (folder / "0").touch()
    rank = Cores(folder)
    assert rank.claim([Core(cpu=0, node=0)], 1) == (0,)
    rank.release()
    assert not (folder / "0").exists()


def test_a_folder_that_turns_unusable_keeps_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, locked = tmp_path / "cores", []

    def lock_and_lose(file: int, how: int) -> None:
        locked.append(file)
        (folder / "0").unlink()
        folder.rmdir()
        folder.touch()  # a path below a file is not just absent

    monkeypatch.setattr(fcntl, "flock", lock_and_lose)
    assert Cores(folder).claim([Core(cpu=0, node=0)], 1) == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(locked[0])


def test_a_core_has_one_rank_also_while_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, lock = [Core(cpu=0, node=0)], fcntl.flock
    first, second, late = (Cores(tmp_path / "cores") for _ in range(3))
    assert first.claim(core, 1) == (0,)

    def hand_on_and_lock(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.release()
        assert second.claim(core, 1) == (0,)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", hand_on_and_lock)
    assert late.claim(core, 1) == ()
    second.release()
    assert late.claim(core, 1) == (0,)
    late.release()


def test_more_threads_than_cores_are_left_to_the_system(tmp_path: Path) -> None:
    rank = Cores(tmp_path)
    assert rank.claim([Core(cpu=0, node=0), Core(cpu=1, node=0)], 3) == ()
    rank.bind()


def test_the_setting_turns_it_off_or_names_the_cpus() -> None:
    assert claim_cores(1, "off").cpus == ()
    assert claim_cores(1, "100000").cpus == ()  # not ours: the log says so
    first = min(os.sched_getaffinity(0))
    assert claim_cores(4, f"{first}-{first}").cpus == (first,)
    with pytest.raises(Misconfigured, match="bind_cores = '0-x'"):
        WorkerConfig(model="m", bind_cores="0-x")


def test_that_cores_do_not_suffice_is_said_once_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for rank in range(3):
            claim_cores(100_000, "auto", rank)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["threads are not bound to cores"]


@pytest.mark.parametrize(
    ("device", "threads", "bound", "said", "spins"),
    [
        ("cpu", "1", "off", None, str(NUM_SPINS)),
        ("cpu", "1", "off", "7", "7"),
        ("cpu", "1", "0", None, str(NUM_SPINS)),
        ("cpu", None, "off", None, str(NUM_SPINS)),  # as of `baton worker`
        pytest.param("auto", None, "off", None, str(NUM_SPINS), marks=pytest.mark.skipif(HAS_GPU, reason="has a GPU")),
    ],
)
def test_a_ranks_idle_threads_spin_briefly(
    device: str, threads: str | None, bound: str, said: str | None, spins: str
) -> None:
    """In a process of its own, because OpenMP reads the setting when torch is imported."""
    program = (
        "import json, os, sys\n"
        "from cluster.supervision.rank import RankSpec, _claim\n"
        "from protos.values import WorkerRole\n"
        "from workers.worker_config import RankId, WorkerConfig\n"
        "orders = RankSpec(\n"
        "    role=WorkerRole.DECODE, worker=WorkerConfig(model='m', device=sys.argv[2], bind_cores=sys.argv[1]),\n"
        "    rank_id=RankId(worker_id='d0', incarnation=1),\n"
        ")\n"
        "_claim(orders)\n"
        "print(json.dumps([os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules]))\n"
    )
    cpu = str(min(os.sched_getaffinity(0))) if bound == "0" else bound
    variables = {"GOMP_SPINCOUNT": said, "OMP_NUM_THREADS": threads}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment |= {name: value for name, value in variables.items() if value is not None}
    printed = subprocess.check_output([sys.executable, "-c", program, cpu, device], env=environment, text=True)
    assert json.loads(printed) == [spins, False]
