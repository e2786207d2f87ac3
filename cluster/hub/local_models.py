"""A deployment whose names of the hub are paths of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster.config.cluster_config import ClusterConfig
from cluster.hub.download import local_model
from protos.errors import Misconfigured
from protos.model_files.hub_name import HubName
from workers.adapters.names import parse_adapters
from workers.speculation.registry import SpeculateMode
from workers.worker_config import WorkerConfig


def with_local_models(config: ClusterConfig, *, weights: bool = True) -> ClusterConfig:
    """Downloads the model (all but its safetensors without `weights`), its adapters and its draft unless they are
    cached. Blocks. Raises Misconfigured, or
    Unavailable if a later try may help."""
    adapters, mode = parse_adapters(config.worker.adapters), SpeculateMode.of(config.worker.speculate)
    named = [one for one in (config.worker.model, *adapters.values(), mode.path) if HubName.of(one) is not None]
    if not named:
        return config
    if config.ray.address and not config.ray.downloads:
        raise Misconfigured(
            f"{named[0]} is no folder or file, and machines of an existing Ray download nothing: give a path "
            "that all of them have, or allow it with --set ray.downloads=true",
            param="ray.downloads",
        )
    router, name = config.router, HubName.of(config.worker.model)
    worker = _located(config.worker, lambda path, of: local_model(path, of, weights=weights or of != "model"))
    if name is not None and router.model_name == name.model:  # other programs call the model by its whole name
        router = replace(router, model_aliases=", ".join(filter(None, (router.model_aliases, name.repository))))
    return replace(config, worker=worker, router=replace(router, model_path=Path(worker.model)))


def with_cached_models(worker: WorkerConfig) -> WorkerConfig:
    """Replaces paths in the cache of the supervisor's machine by the same commits in this machine's cache."""
    return _located(worker, lambda path, setting: local_model(str(HubName.of_cached(path) or path), setting))


def _located(worker: WorkerConfig, locate: Callable[[str, str], str]) -> WorkerConfig:
    mode = SpeculateMode.of(worker.speculate)
    paths = {name: locate(path, "worker.adapters") for name, path in parse_adapters(worker.adapters).items()}
    return replace(
        worker,
        model=locate(worker.model, "model"),
        adapters=", ".join(f"{name}={path}" for name, path in paths.items()),
        speculate=f"{mode.kind}:{locate(mode.path, 'worker.speculate')}" if mode.path else mode.kind,
    )
