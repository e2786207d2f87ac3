"""A controller continues with the workers of an earlier one.

workers as they are ─▶ a roll that was cut off: ABORT │ other numbers: SCALE │ other settings of workers: ROLL
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.capacity.controller import FleetRecord, as_cut_off
from cluster.capacity.roll import RETRY_S, Counts, FleetActuator, FleetRoll, RollMix
from cluster.config.cluster_config import ClusterConfig
from cluster.config.revised import changed_settings, digest_of, revised
from cluster.supervision.living import LivingFleet
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import BatonError, Unavailable
from router.fleet_owner import ChangeState, DesiredFleet, FleetOrder, FleetOwner, OrderKind

log = logging.getLogger("baton.cluster")

WHO, WHY = "baton pools", "its settings have changed"


def takeover_of(left: LivingFleet | None, record: FleetRecord | None, config: ClusterConfig) -> Takeover | None:
    """Returns None without workers, or if changed settings make them unreachable and cannot be rolled."""
    if left is None or not left.living:
        return None
    if not (differing := _differing(left, config)):
        return Takeover(left, record, config)
    log.warning("the workers of an earlier `baton pools` end: these settings differ: %s", differing)
    return None


def _differing(left: LivingFleet, config: ClusterConfig) -> str:
    token = config.peers.token or left.peers.token
    other = {
        "pools": not {plan.role for plan in left.plans} <= config.pools.counts().keys(),
        "peers": replace(config.peers, token=token) != left.peers,
        "ray.address": config.ray.address != left.ray_address,
        "worker.device": config.worker.device != left.worker.device,
    }
    return ", ".join(name for name, differs in other.items() if differs)


class Takeover:
    """The takeover of `left` workers: `record` is their owner's, `wanted` the new configuration, `config` that of the
    first revision."""

    def __init__(self, left: LivingFleet, record: FleetRecord | None, wanted: ClusterConfig) -> None:
        self.config = replace(wanted, peers=left.peers, worker=left.worker)
        self.origin = digest_of(wanted)
        self._plans = left.plans
        configured = DesiredFleet(counts=dict(wanted.pools.counts()))
        record = record or FleetRecord(configured=configured, desired=configured, origin=digest_of(self.config))
        desired, latest = record.desired, record.changes[-1] if record.changes else None
        if latest is not None and latest.kind is OrderKind.ROLL and latest.state is ChangeState.UNDER_WAY:
            desired = latest.before
        self._others = [plan for plan in left.plans if plan.revision != desired.revision]
        if not self._others:
            desired = replace(desired, counts=self._counts(left.plans, configured))
        self.orders = self._orders(record, replace(record, configured=configured, desired=desired), wanted)
        is_rolled = any(order.kind is OrderKind.ROLL for order in self.orders)
        self.record = replace(
            record, configured=configured, desired=desired, changes=as_cut_off(record.changes),
            origin=record.origin if is_rolled else self.origin,
        )  # fmt: skip

    def cut_off(self, actuator: FleetActuator) -> FleetRoll | None:
        if not self._others:
            return None
        desired = self.record.desired
        newer = self._counts([plan for plan in self._plans if plan not in self._others], desired)
        mix = RollMix(newer=newer, older=self._counts(self._others, desired))
        former = self._others[0].revision
        return FleetRoll(actuator, desired.counts, former=former, to=desired.revision, surge=1, mix=mix)

    async def carry_out(self, owner: FleetOwner) -> None:
        """Returns when each of the `orders` has begun."""
        for order in self.orders:
            while True:
                try:
                    await owner.order(order)
                except Unavailable:  # Ray is being started
                    await asyncio.sleep(RETRY_S)
                    continue
                except BatonError as error:
                    log.error("the workers keep their settings: %s", error.message)
                break

    def _orders(self, before: FleetRecord, record: FleetRecord, wanted: ClusterConfig) -> Sequence[FleetOrder]:
        orders: list[FleetOrder] = []
        if record.configured != before.configured and record.configured.counts != record.desired.counts:
            orders.append(FleetOrder(kind=OrderKind.SCALE, counts=record.configured.counts, who=WHO, why=WHY))
        present = revised(self.config, record.desired.revision)
        is_other_model = Path(present.worker.model).absolute() != Path(wanted.worker.model).absolute()
        model, settings = wanted.worker.model if is_other_model else "", changed_settings(present, wanted)
        if record.origin != self.origin and (model or settings):
            orders.append(FleetOrder(kind=OrderKind.ROLL, model=model, settings=settings, who=WHO, why=WHY))
        elif self._others and not orders:
            orders.append(FleetOrder(kind=OrderKind.ABORT, who=WHO, why="the roll was cut off"))
        return orders

    @staticmethod
    def _counts(plans: Sequence[WorkerPlan], like: DesiredFleet) -> Counts:
        roles = Counter(plan.role for plan in plans)
        return {role: roles[role] for role in like.counts}
