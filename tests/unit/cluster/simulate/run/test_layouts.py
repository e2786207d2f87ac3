"""Simulated models whose layers have windows, and latents: pages of each group, as the engine's layout has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.simulate.latency.step_work import step_of, windowed_step_of
from cluster.simulate.node.device import Device, Payload
from cluster.simulate.run.simulation import simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec
from cluster.simulate.run.soak_trial import reason
from protos.values import KVLayout
from tests.unit.cluster.simulate.towns import sessions, town
from workers.kv.groups import with_windows

SEVERAL: dict[str, tuple[int | None, ...]] = {"mixed": (40, 40, None), "short": (5, None), "all windowed": (40,)}


def windowed(windows: tuple[int | None, ...], **more: Any) -> SimulationConfig:
    config = town(audit_every=20, seed=3, **more)
    layout = KVLayout.dense(num_layers=6, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    layout = with_windows(layout, [windows[layer % len(windows)] for layer in range(6)])
    assert layout.frees_blocks
    return replace(config, spec=replace(config.spec, layout=layout, num_blocks=150, thorough=True, host_blocks=100))


@pytest.mark.parametrize("name", SEVERAL)
def test_answers_are_right_in_leaps_and_in_single_steps(name: str) -> None:
    logs: list[list[str]] = []
    for leaping in (True, False):
        lines: list[str] = []
        outcome = simulate(
            windowed(SEVERAL[name], leaping=leaping), sessions("conversations", num=12), write=lines.append
        )
        assert len(outcome.records) == 12
        assert not outcome.failures
        logs.append(lines)
    assert logs[0] == logs[1], "a leap changes events"


@pytest.mark.parametrize("name", SEVERAL)
def test_a_window_that_was_not_moved_makes_a_wrong_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Device.read

    def lose_windows(device: Device, *arguments: Any) -> Payload:
        payload = read(device, *arguments)
        is_tail = len(arguments[0].block_ids) < 5
        return replace(payload, content=payload.content * 0) if is_tail else payload

    monkeypatch.setattr(Device, "read", lose_windows)
    with pytest.raises(BaseExceptionGroup) as raised:
        simulate(windowed(SEVERAL[name]), sessions(num=6))
    assert "token" in reason(raised.value)


def test_a_mixed_window_model_keeps_and_reads_less() -> None:
    spec = hardware_spec(gpu="h100", model="gpt-oss-20b", tp=1)
    assert [(len(group.layers), group.window) for group in spec.layout.groups] == [(12, None), (12, 128)]
    rows = [(1, 100_000)] * 8
    step_s = spec.latency.step_s
    assert step_s(windowed_step_of(rows, spec.shares)) < 0.7 * step_s(step_of(rows))
    assert windowed_step_of([(3, 10), (1, 4)], [(None, 1.0)]) == step_of([(3, 10), (1, 4)])
    assert windowed_step_of([(3, 10)], [(4, 1.0)]).num_attended == 4 * 3
    assert windowed_step_of([(3, 10)], [(4, 1.0)]).num_read == 6
