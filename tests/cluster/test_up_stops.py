"""Stopping, in order and otherwise: exit codes, what clients see, and that no process is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.deployed import DEMO, LONG, PRECISE, Deployed, completion_tokens

pytestmark = pytest.mark.cluster

Deploy = Callable[..., Deployed]
PORTS = ("--port", "0", "--grpc-port", "0")


def test_two_ranks_answer_and_die_as_one(up: Deployed, deploy: Deploy) -> None:
    """One cluster for three things, because it takes seconds to start."""
    pair = deploy("up", *PORTS, *PRECISE, "--colocated", "--tp", "2")
    assert pair.text(LONG) == up.text(LONG)

    ranks = pair.worker_pids("colocated-0")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    pair.wait_for(r"^worker colocated-0 at \S+ is ready", times=2)
    assert not set(pair.worker_pids("colocated-0", life=2)) & set(ranks)
    assert pair.text(LONG) == up.text(LONG)

    with pair.streaming(LONG, max_tokens=300) as events:
        os.killpg(pair.process.pid, signal.SIGTERM)  # also to Ray's processes, if they were of its group
        assert completion_tokens(events) == 300
        assert pair.ended() == 0, pair.log
        assert "it is killed" not in pair.log
    assert pair.processes() == {}


def test_a_model_that_cannot_be_served_ends_it_with_the_reason(deploy: Deploy, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(DEMO, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    cluster = deploy("serve", "--model", str(broken), *PORTS, *PRECISE)
    said = cluster.wait_for("^baton: ").string
    assert cluster.ended() == 2, cluster.log
    assert "mamba" in said.lower()
    assert "Traceback" not in cluster.log
    assert cluster.processes() == {}


def test_settings_refused_by_a_worker_end_it_with_the_reason(deploy: Deploy) -> None:
    settings = "worker.num_blocks=8", "worker.max_model_len=512"
    cluster = deploy(
        "up", "--workers", "1", *PORTS, *PRECISE, *(word for setting in settings for word in ("--set", setting))
    )
    said = cluster.wait_for("^baton: ").string
    assert cluster.ended() == 2, cluster.log
    assert "worker.max_model_len = 512" in said
    assert "128 tokens" in said
    assert "Traceback" not in cluster.log
    assert cluster.processes() == {}


def test_a_stop_while_it_starts_leaves_nothing(deploy: Deploy) -> None:
    cluster = deploy("up", *PORTS, *PRECISE)
    cluster.wait_for("^starting Ray")
    assert cluster.stop(signal.SIGINT) == 0, cluster.log
    assert cluster.processes() == {}


TOKEN = ("--token", "a-token-of-thirty-two-characters")


def test_gateway_and_workers_can_run_apart_without_ray(deploy: Deploy, up: Deployed) -> None:
    addresses: list[str] = []
    for role in ("prefill", "decode"):
        worker = deploy("worker", "--role", role, "--model", str(DEMO), "--served-name", "demo", *TOKEN, *PRECISE)
        addresses += ["--worker", worker.wait_for(r"^\S+ serves demo at (\S+)$").group(1)]
    gateway = deploy("gateway", "--model", str(DEMO), "--served-name", "demo", *PORTS, *TOKEN, *addresses)
    gateway.wait_for(r"is ready$", times=2)
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
    assert gateway.text(LONG) == up.text(LONG)
    assert gateway.metric("baton_pool_transfer_bytes_total", "decode") > 0
    assert gateway.stop() == 0
