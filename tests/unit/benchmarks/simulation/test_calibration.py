"""A calibration finds the step times that its points were made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulation.calibration import NOTHING, Calibrated, MeasuredStep, calibrate, read_points
from cluster.simulate.latency.step_work import StepWork, step_of


def test_a_calibration_finds_the_coefficients_and_its_error() -> None:
    truth = Calibrated(base_s=0.003, row_s=1e-4, token_s=2e-5, read_s=1e-7, attended_s=0.0, request_s=0.005)
    shapes = [(tokens, before, rows) for tokens in (1, 64, 500) for before in (0, 900) for rows in (1, 4, 16)]
    steps = [step_of([(tokens, tokens + before)] * rows) for tokens, before, rows in shapes]
    points = [MeasuredStep(step=step, seconds=truth.step_s(step)) for step in steps]
    first_tokens = [
        MeasuredStep(step=point.step, seconds=point.seconds + truth.request_s, num_requests=1) for point in points
    ]
    fitted = calibrate([*points, *first_tokens])
    assert fitted.request_s == pytest.approx(truth.request_s)
    assert fitted.error is not None
    assert fitted.error < 1e-6
    assert [fitted.step_s(step) for step in steps] == pytest.approx([truth.step_s(step) for step in steps])


def test_no_coefficient_is_negative_however_noisy_the_steps() -> None:
    steps = [step_of([(1, 100)] * rows) for rows in range(1, 9)]
    falling = [MeasuredStep(step=step, seconds=0.01 / step.num_rows) for step in steps]
    fitted = calibrate(falling)
    assert min(fitted.base_s, fitted.row_s, fitted.token_s, fitted.read_s, fitted.attended_s) >= 0
    assert fitted.error is not None
    assert fitted.worst is not None
    assert fitted.worst > fitted.error > 0


def test_an_exactly_determined_fit_claims_no_accuracy() -> None:
    step = MeasuredStep(step=step_of([(100, 100)]), seconds=0.01)
    assert calibrate([step]).error is None
    assert "too few points to know its error" in str(calibrate([step] * 3))
    assert "calibrated on 1 step:" in str(calibrate([step]))


def test_a_profile_of_a_bench_is_its_steps(tmp_path: Path) -> None:
    def spans(pid: int, start: int, rows: int) -> list[dict[str, object]]:
        told = {"step": 1, "num_rows": rows, "num_tokens": 8 * rows, "num_read": 80 * rows, "num_attended": 600 * rows}
        parts = [
            ("tick", 0, 100, {}),
            ("plan", 100, 50, {}),
            ("launch", 150, 700, told),
            ("apply", 900, 80, told),
            ("tell", 980, 20, {}),
        ]
        return [
            {"name": name, "ph": "X", "ts": start + ts, "dur": dur, "pid": pid, "tid": 0, "args": args}
            for name, ts, dur, args in parts
        ]

    idle = {"name": "tick", "ph": "X", "ts": 0, "dur": 100, "pid": 1, "tid": 0, "args": {}}
    events = [{"name": "process_name", "ph": "M", "pid": 1}, idle, *spans(2, 4500, 3), *spans(1, 4000, 2)]
    events += spans(1, 10000, 1)
    for number, (begin, first, end) in enumerate(((3900, 5600, 8000), (4100, 5700, 7000), (9500, 14000, 15000))):
        times = (("b", begin), ("n", first), ("e", end))
        events += [{"name": "request", "cat": "request", "id": number, "ph": ph, "ts": ts} for ph, ts in times]
    (tmp_path / "profile.json").write_text(json.dumps({"traceEvents": events}))
    assert read_points(tmp_path / "profile.json") == [
        MeasuredStep(step=StepWork(2, 16, 160, 1200), seconds=0.001),
        MeasuredStep(step=StepWork(3, 24, 240, 1800), seconds=0.001),
        MeasuredStep(step=StepWork(1, 8, 80, 600), seconds=0.001),
        MeasuredStep(step=NOTHING, seconds=0.0035, num_requests=1),
    ]
