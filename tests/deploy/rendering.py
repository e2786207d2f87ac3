"""The manifests as kubectl renders them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).resolve().parent.parent.parent / "deploy" / "k8s"
SHAPES = {"base": K8S / "base", "gpu": K8S / "overlays" / "gpu"}
Manifest = dict[str, Any]


class Rendered:
    """One shape of the deployment; `of` finds a kind's objects by name."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def of(self, kind: str) -> dict[str, Manifest]:
        return {one["metadata"]["name"]: one for one in self.manifests if one["kind"] == kind}

    @property
    def ray(self) -> Manifest:
        [cluster] = self.of("RayCluster").values()
        return dict(cluster["spec"])

    @property
    def groups(self) -> dict[str, Manifest]:
        """Ray's worker groups, by pool."""
        return {group["groupName"]: group for group in self.ray["workerGroupSpecs"]}

    @property
    def templates(self) -> dict[str, Manifest]:
        """Every pod template, by the name of what makes its pods. Ray's get the label that KubeRay adds."""
        found = {name: one["spec"]["template"] for name, one in self.of("Deployment").items()}
        found["head"] = self.ray["headGroupSpec"]["template"]
        return found | {pool: group["template"] for pool, group in self.groups.items()}

    @property
    def containers(self) -> dict[str, Manifest]:
        return {name: one for name, template in self.templates.items() for one in template["spec"]["containers"]}

    @property
    def settings(self) -> str:
        """baton.toml, as the pods will read it."""
        [config_map] = self.of("ConfigMap").values()
        return str(config_map["data"]["baton.toml"])


@cache
def render(folder: Path) -> Rendered:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("kubectl is not installed: `make test` installs it as root on Debian, elsewhere it is yours to do")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Rendered([one for one in yaml.safe_load_all(done.stdout) if one])
