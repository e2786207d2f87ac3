"""The manifests as kubectl renders them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.config.cluster_config import ClusterConfig
from cluster.config.settings import make_config

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "deploy" / "k8s"
SCHEMAS = [folder / "shared" / "schemas" for folder in ROOT.parents]
POOLS = ("prefill", "decode")
SHAPES = {"base": K8S / "base", "gpu": K8S / "overlays" / "gpu"}
Manifest = dict[str, Any]


class Rendered:
    """One shape of the deployment; `of` finds a kind's objects by name."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def of(self, kind: str) -> dict[str, Manifest]:
        return {manifest["metadata"]["name"]: manifest for manifest in self.manifests if manifest["kind"] == kind}

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
        """Every pod template, by the object that makes its pods. Ray's have the label that KubeRay adds."""
        by_name = {name: value["spec"]["template"] for name, value in self.of("Deployment").items()}
        by_name["head"] = self.ray["headGroupSpec"]["template"]
        return by_name | {pool: group["template"] for pool, group in self.groups.items()}

    @property
    def containers(self) -> dict[str, Manifest]:
        return {
            name: container for name, template in self.templates.items() for container in template["spec"]["containers"]
        }

    @property
    def settings(self) -> str:
        """baton.toml, as the pods will read it."""
        [settings] = [
            config_map["data"]["baton.toml"]
            for config_map in self.of("ConfigMap").values()
            if "baton.toml" in config_map["data"]
        ]
        return str(settings)


@cache
def render(folder: Path) -> Rendered:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.fail("kubectl is not installed: `make test` installs it as root on Debian, elsewhere it is yours to do")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Rendered([document for document in yaml.safe_load_all(done.stdout) if document])


@cache
def ray_help(verb: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", verb, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def config_of(shape: Rendered) -> ClusterConfig:
    return make_config(tomllib.loads(shape.settings))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    exact = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", ())
    assert all(term["operator"] == "In" for term in among), "the only one used here"
    return exact.items() <= labels.items() and all(labels.get(term["key"]) in term["values"] for term in among)


def selected(shape: Rendered, selector: Mapping[str, Any]) -> set[str]:
    """Names of the pods that a selector finds."""
    return {name for name, manifest in shape.templates.items() if selects(selector, manifest["metadata"]["labels"])}


def ports_of(container: Manifest) -> dict[str, int]:
    return {entry["name"]: entry["containerPort"] for entry in container.get("ports", ())}


CUSTOM = {
    "RayCluster": ("ray.io_rayclusters.yaml", "v1"),
    "PodMonitor": ("monitoring.coreos.com_podmonitors.yaml", "v1"),
    "PrometheusRule": ("monitoring.coreos.com_prometheusrules.yaml", "v1"),
    "HTTPRoute": ("gateway.networking.k8s.io_httproutes.yaml", "v1"),
}


def check_schemas(shape: Rendered) -> None:
    """Checks schemas strictly, also of pods in custom resources. Skips if a schema is missing."""
    for manifest in shape.manifests:
        if manifest["kind"] in CUSTOM:
            crd_validator(*CUSTOM[manifest["kind"]]).validate(manifest)
        else:
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    for name in ("head", *POOLS):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": shape.templates[name]["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@cache
def crd_validator(file: str, version: str) -> Any:
    """The validator of a custom resource; an unknown field is an error. Skips where the file is not at hand."""
    path = next((folder / file for folder in SCHEMAS if (folder / file).is_file()), None)
    if path is None:
        pytest.skip(f"{file} is in no shared/schemas beside this checkout")
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    [schema] = [
        entry["schema"]["openAPIV3Schema"] for entry in definition["spec"]["versions"] if entry["name"] == version
    ]
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {name: _strict(value) for name, value in schema.items() if name not in ("description", "default")}
    if isinstance(schema.get("pattern"), str):
        strict["pattern"] = schema["pattern"].replace("^(?i)", "(?i)^")  # Go's place for the flag
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        strict["additionalProperties"] = False
    return strict
