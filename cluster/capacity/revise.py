"""Rolls of workers that a configuration describes."""

from __future__ import annotations

from cluster.capacity.controller import Rolls
from cluster.capacity.roll import RollActuator
from cluster.config.config import ClusterConfig
from cluster.config.revised import digest_of, next_revision
from router.fleet_owner import FleetOrder, Revision


def rolls_of(actuator: RollActuator, config: ClusterConfig, origin: str = "") -> Rolls:
    """`origin`: the digest of the owner's settings, if they differ from those of the first revision, `config`."""

    def revise(current: Revision, order: FleetOrder) -> Revision:
        return next_revision(config, current, model=order.model, settings=order.settings, fingerprint=order.files)

    return Rolls(actuator=actuator, revise=revise, origin=origin or digest_of(config))
