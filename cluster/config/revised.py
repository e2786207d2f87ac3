"""The configuration of a revision: what a roll changes of model and worker settings, checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cluster.config.cluster_config import ClusterConfig
from cluster.config.declared import DeclaredSetting, declared_settings
from cluster.config.settings import checked_value
from protos.errors import Misconfigured
from protos.hints import nearest
from router.fleet_owner import FleetOrder, Revision, SettingValue

_KEPT = ("model", "served_name", "worker.device")
_DIGEST_BYTES = 4


def digest_of(config: ClusterConfig) -> str:
    return _digest({"worker": asdict(config.worker)})


def next_revision(
    config: ClusterConfig, current: Revision, *, model: str, settings: Mapping[str, SettingValue], fingerprint: str
) -> Revision:
    """The current revision with another model (unless ""), and other `settings` by path. A changed `fingerprint` of the
    model's files is a new revision, too. Raises Misconfigured."""
    merged = {**current.settings, **settings}
    path = str(Path(model).absolute()) if model else current.model
    revision = Revision(model=path, settings=merged, files=fingerprint or current.files)
    after = revised(config, revision)  # also checks the revision
    if revision.files == current.files and after == revised(config, replace(current, name="")):
        return current
    return replace(revision, name=_digest(asdict(revision)))


def reviser(config: ClusterConfig) -> Callable[[Revision, FleetOrder], Revision]:
    """Returns a function from a revision and a roll to the next revision, for a fleet that began with these settings.
    It raises Misconfigured."""

    def revise(current: Revision, order: FleetOrder) -> Revision:
        return next_revision(config, current, model=order.model, settings=order.settings, fingerprint=order.files)

    return revise


def changed_settings(before: ClusterConfig, after: ClusterConfig) -> dict[str, SettingValue]:
    """The settings that a roll changes and that differ, with their values in `after`."""
    return {
        path: declared.value(after)
        for path, declared in declared_settings().items()
        if _is_rolled(declared) and declared.value(after) != declared.value(before)
    }


def revised(config: ClusterConfig, revision: Revision) -> ClusterConfig:
    """The configuration with which workers of this revision start. Raises Misconfigured."""
    if revision.model:
        config = replace(config, worker=replace(config.worker, model=revision.model))
    for path, value in revision.settings.items():
        config = _with(config, _declared(path).attribute.split("."), checked_value(path, value))
    return replace(config, worker=replace(config.worker, revision=revision.name))


def _declared(path: str) -> DeclaredSetting:
    """Raises Misconfigured for a setting that a roll cannot change."""
    known = declared_settings().get(path)
    if known is None:
        near = nearest(path, declared_settings())
        hint = f"did you mean {near}?" if near else "`baton config` prints all of them"
        raise Misconfigured(f"there is no setting {path}: {hint}", param="settings")
    if not _is_rolled(known):
        fix = "`baton scale` changes numbers of workers" if path.startswith("pools.") else "the rest changes at a start"
        raise Misconfigured(
            f"{path} is no setting that a roll changes: give --model, or settings of worker or lanes; {fix}",
            param="settings",
        )
    return known


def _is_rolled(declared: DeclaredSetting) -> bool:
    return declared.attribute.startswith("worker.") and declared.path not in _KEPT


def _with(config: Any, names: list[str], value: SettingValue) -> Any:
    name, *below = names
    return replace(config, **{name: _with(getattr(config, name), below, value) if below else value})


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES).hexdigest()
