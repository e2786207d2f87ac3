"""Settings of the planner, and the limits of a fleet as people write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cluster.planner.planner import PlannerSettings
from cluster.planner.planner_values import FleetLimits, FleetObjective, PlannerPace
from protos.errors import Misconfigured
from protos.setting import CheckedSettings, setting
from protos.values import WorkerRole

WINDOW_PERIODS = 4  # a decision looks at the requests of so many periods
REST_SETTLES = 3  # at least so many times settle_s pass between two changes that make the fleet smaller
_BOUNDS = re.compile(r"(?:(?P<role>[a-z]+)=)?(?P<least>\d{1,4}):(?P<most>\d{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig(CheckedSettings):
    """A planner keeps the objective (`router.ttft_ms`, `router.tpot_ms`) with workers within `autoscale`."""

    autoscale: str = setting(
        "", "Least and most workers of each pool, as 1:8, or prefill=0:4,decode=1:8; empty: no planner.",
        flag="autoscale",
    )  # fmt: skip
    attainment: float = setting(0.95, "Share of requests that shall meet the objective.", above=0, most=1)
    period_s: float = setting(15.0, "Time between two decisions.", least=0.1)
    settle_s: float = setting(300.0, "Fewer workers must have sufficed for this long before one goes.", least=1)
    manual_s: float = setting(1800.0, "An operator's change is left alone for this long.", least=0)

    def __post_init__(self) -> None:
        super(PlannerConfig, self).__post_init__()
        if self.autoscale:
            parse_bounds(self.autoscale)

    def settings(
        self, devices: Mapping[WorkerRole, int], *, ttft_ms: float, tpot_ms: float, absent: Collection[WorkerRole] = ()
    ) -> PlannerSettings:
        """`absent`: roles that get workers only if `autoscale` names them. Raises Misconfigured."""
        return PlannerSettings(
            objective=FleetObjective(ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000, attainment=self.attainment),
            limits=limits_of(self.autoscale, devices, absent=absent),
            pace=PlannerPace(settle_s=self.settle_s, rest_s=REST_SETTLES * self.settle_s),
            period_s=self.period_s,
            window_s=WINDOW_PERIODS * self.period_s,
            manual_s=self.manual_s,
        )


def limits_of(within: str, devices: Mapping[WorkerRole, int], *, absent: Collection[WorkerRole] = ()) -> FleetLimits:
    """Parses 1:8, or prefill=0:4,decode=1:8. `devices`: of one worker. Raises Misconfigured."""
    bounds = parse_bounds(within)
    everywhere = bounds.get("")
    if unknown := [role for role in bounds if role and role not in devices]:
        raise Misconfigured(
            f"--autoscale {within}: this cluster has no {unknown[0]} pool: give {' and '.join(devices)}",
            param="autoscale",
        )
    if missing := [role for role in devices if role not in {*bounds, *absent} and everywhere is None]:
        raise Misconfigured(f"--autoscale {within}: give the limits of {missing[0]}, too", param="autoscale")
    of = {role: bounds.get(role, (0, 0) if role in absent else everywhere) or (0, 0) for role in devices}
    writing = [role for role in devices if role is not WorkerRole.PREFILL]
    if any(of[role][0] == 0 for role in writing) and any(least for least, _ in of.values()):
        raise Misconfigured(
            f"--autoscale {within}: {writing[0]}={of[writing[0]][0]}:{of[writing[0]][1]}: without {writing[0]} workers "
            "no answers are written: give 1 or more, or 0 to every pool, which then sleep together",
            param="autoscale",
        )
    return FleetLimits(
        least={role: least for role, (least, _) in of.items()},
        most={role: most for role, (_, most) in of.items()},
        devices=devices,
        max_devices=sum(of[role][1] * devices[role] for role in devices),
    )


def parse_bounds(within: str) -> dict[str, tuple[int, int]]:
    """Returns least and most workers by role, "" for all roles. Raises Misconfigured."""
    bounds: dict[str, tuple[int, int]] = {}
    for part in within.split(","):
        parsed = _BOUNDS.fullmatch(part.strip())
        least, most = (int(parsed["least"]), int(parsed["most"])) if parsed is not None else (1, 0)
        if parsed is None or least > most or not most or (parsed["role"] or "") in bounds:
            raise Misconfigured(
                f"--autoscale {within}: give the least and the most workers of a pool, as 1:8, or of each pool, as "
                "prefill=0:4,decode=1:8",
                param="autoscale",
            )
        bounds[parsed["role"] or ""] = (least, most)
    return bounds
