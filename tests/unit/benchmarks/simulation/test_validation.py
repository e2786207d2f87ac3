"""A calibration on other requests is held to the same aim as one on the very run that is compared."""

from __future__ import annotations

import pytest

from benchmarks.simulation.validation import LOADS, Compared, MeanTimes, farthest, missed, through_gateway
from cluster.simulate.world.simulated_load import UserSession

LIVE = MeanTimes(ttft_s=0.020, tpot_s=0.0030)
NEAR = MeanTimes(ttft_s=0.018, tpot_s=0.0033)
FAR = MeanTimes(ttft_s=0.028, tpot_s=0.0030)
LOW = MeanTimes(ttft_s=0.020, tpot_s=0.0023)


@pytest.mark.parametrize(
    ("own", "others", "which"),
    [
        (NEAR, NEAR, []),
        (NEAR, FAR, ["calibrated on other requests"]),
        (NEAR, LOW, ["calibrated on other requests"]),
        (FAR, NEAR, ["calibrated on the run itself"]),
    ],
)
def test_either_calibration_can_miss_the_aim(own: MeanTimes, others: MeanTimes, which: list[str]) -> None:
    compared = [
        Compared(load=LOADS[0], live=LIVE, simulated=NEAR, foretold=NEAR),
        Compared(load=LOADS[1], live=LIVE, simulated=own, foretold=others),
    ]
    assert missed(compared) == which


def test_the_farthest_error_is_told_with_its_sign() -> None:
    errors = farthest([Compared(load=LOADS[0], live=LIVE, simulated=NEAR, foretold=LOW)])
    assert errors["calibrated on other requests"] == pytest.approx(-7 / 30)


def test_a_gateway_handles_requests_one_after_the_other() -> None:
    sessions = [UserSession(number=number, due_s=due_s, turns=()) for number, due_s in enumerate((0.0, 0.01, 5.0))]
    assert [session.due_s for session in through_gateway(sessions, 0.05)] == pytest.approx([0.05, 0.1, 5.05])
