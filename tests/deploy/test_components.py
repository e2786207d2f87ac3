"""The components: each by itself and all at once, over both shapes of the deployment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import test_k8s
from tests.deploy.rendering import (
    K8S,
    POOLS,
    ROOT,
    SHAPES,
    Manifest,
    Rendered,
    check_schemas,
    crd_validator,
    ports_of,
    render,
)

COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
LAST = ("tls",)  # changes what others add
Combine = Callable[..., Rendered]


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> Combine:
    """Renders a shape with components, and further entries of a kustomization, from a copy of deploy/k8s with the files
    of secrets.sh."""
    version = yaml.safe_load(subprocess.check_output(["kubectl", "version", "--client", "-o", "yaml"], text=True))
    if tuple(int(version["clientVersion"][part].rstrip("+")) for part in ("major", "minor")) < (1, 21):
        pytest.skip("kubectl before 1.21 knows no components")
    copy = tmp_path_factory.mktemp("deploy") / "k8s"
    shutil.copytree(K8S, copy)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [copy / "secrets.sh", "--files", copy / "components" / "secrets"],
        env=os.environ | {"PATH": tools, "HF_TOKEN": "hf_token"}, check=True,
    )  # fmt: skip

    def combine(shape: str, names: Sequence[str], **more: Any) -> Rendered:
        folder = copy / "-".join(("cluster", shape, *names, *more))  # each is rendered once
        folder.mkdir(exist_ok=True)
        kustomization = {
            "namespace": "baton",
            "resources": [f"../{SHAPES[shape].relative_to(K8S)}"],
            "components": [f"../components/{name}" for name in names],
            **more,
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(folder)

    return combine


def documented(key: str) -> list[Manifest]:
    """The kustomizations of docs/kubernetes.md with this key."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    return [block for block in blocks if key in block]


@pytest.fixture(params=sorted(SHAPES))
def whole(request: pytest.FixtureRequest, combined: Combine) -> Rendered:
    """A shape with every component."""
    return combined(request.param, [*(name for name in COMPONENTS if name not in LAST), *LAST])


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_renders_and_follows_the_schemas(combined: Combine, name: str) -> None:
    check_schemas(combined("base", [name]))


def test_the_examples_of_the_documents_render(combined: Combine) -> None:
    """The fetched model is the one that the page names."""
    for example in documented("resources"):
        names = [Path(folder).name for folder in example.get("components", ())]
        more = {key: value for key, value in example.items() if key not in ("resources", "components")}
        check_schemas(combined("gpu" if "gpu" in str(example["resources"]) else "base", names, **more))
    [patched] = documented("patches")
    fetched = combined("base", ["model-cache"], **patched)
    check_schemas(fetched)
    assert fetched.of("ConfigMap")["model-source"]["data"] == {"MODEL": "Qwen/Qwen3-8B", "REVISION": "main"}


def test_all_components_together_agree(whole: Rendered) -> None:
    check_schemas(whole)
    test_k8s.test_everything_is_in_one_namespace_and_labelled(whole)
    test_k8s.test_flags_of_containers_exist(whole)
    test_k8s.test_what_is_mounted_is_there_and_nobody_writes_models_or_settings(whole)
    test_k8s.test_every_worker_of_the_settings_finds_its_pod(whole)


def containers_of(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def test_every_added_container_is_as_restricted_as_the_rest(whole: Rendered) -> None:
    for name, template in whole.templates.items():
        for container in containers_of(template):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert security["capabilities"].get("add", ["IPC_LOCK"]) == ["IPC_LOCK"], name
            assert "memory" in container["resources"]["limits"], name


def test_only_rdma_needs_a_namespace_with_fewer_restrictions(combined: Combine) -> None:
    label = "pod-security.kubernetes.io/enforce"
    for name in COMPONENTS:
        [namespace] = combined("base", [name]).of("Namespace").values()
        assert namespace["metadata"]["labels"][label] == ("privileged" if name == "rdma" else "restricted"), name


def test_outside_clients_reach_only_the_apis(whole: Rendered) -> None:
    [route] = whole.of("HTTPRoute")["gateway"]["spec"]["rules"]
    [host] = whole.of("Ingress")["gateway"]["spec"]["rules"]
    paths = {rule["path"]["value"] for rule in route["matches"]}
    assert paths == {path["path"] for path in host["http"]["paths"]} == {"/v1", "/api"}
    ports = {port["name"]: port["port"] for port in whole.of("Service")["gateway"]["spec"]["ports"]}
    assert [ref["port"] for ref in route["backendRefs"]] == [ports["http"]]


def test_metrics_are_scraped_at_the_gateways_port(whole: Rendered) -> None:
    [endpoint] = whole.of("PodMonitor")["gateway"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports_of(whole.containers["gateway"])
    assert endpoint["scheme"] == whole.containers["gateway"]["readinessProbe"]["httpGet"]["scheme"].lower() == "https"


def test_members_find_the_certificates_that_settings_name(whole: Rendered) -> None:
    named = [flag.partition("=")[2] for flag in whole.containers["controller"]["args"] if "--set=peers." in flag]
    for name in ("gateway", "controller", *POOLS):
        mounts = {mount["mountPath"] for mount in whole.containers[name]["volumeMounts"]}
        assert {str(Path(flag.partition("=")[2]).parent) for flag in named} <= mounts, name


def test_a_model_is_fetched_to_its_mount(whole: Rendered) -> None:
    for name in ("gateway", *POOLS):
        [fetch] = whole.templates[name]["spec"]["initContainers"]
        assert fetch["image"] == whole.containers[name]["image"], name
        assert "--local-dir /cache/model" in fetch["command"][-1], name
        assert whole.templates[name]["spec"]["securityContext"]["fsGroup"] == 10001, "or it could not write"
        mounts = {mount["mountPath"]: mount for mount in whole.containers[name]["volumeMounts"]}
        assert mounts["/cache"]["readOnly"] is True, name
    assert "--model=/cache/model" in whole.containers["gateway"]["args"]
    assert "--model=/cache/model" in whole.containers["controller"]["args"]


def test_the_written_secret_has_every_key(combined: Combine) -> None:
    [secret] = combined("base", ["secrets"]).of("Secret").values()
    assert secret["metadata"]["name"] == "baton-keys"
    keys = {"admin-key", "client-key", "redis-password", "ray-token", "hf-token", "tenants.toml"}
    assert secret["data"].keys() == keys


def test_rays_autoscaler_may_add_pods_and_reach_the_api_server(whole: Rendered) -> None:
    assert whole.ray["enableInTreeAutoscaling"] is True
    assert whole.ray["autoscalerOptions"]["version"] == "v2"
    assert whole.templates["head"]["spec"]["automountServiceAccountToken"] is True
    for pool, group in whole.groups.items():
        assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"], pool
        assert whole.templates[pool]["spec"]["automountServiceAccountToken"] is False, "only the head needs it"
        assert whole.of("PodDisruptionBudget")[pool]["spec"]["minAvailable"] < group["minReplicas"], "or no node drains"


def test_rays_tables_are_in_a_redis_that_its_head_may_reach(whole: Rendered) -> None:
    options = whole.ray["gcsFaultToleranceOptions"]
    [port] = whole.of("Service")["redis"]["spec"]["ports"]
    assert options["redisAddress"] == f"redis:{port['port']}"
    key = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert key in [
        entry["valueFrom"]["secretKeyRef"] for entry in whole.templates["controller"]["spec"]["containers"][0]["env"]
        if entry["name"] == "BATON_REDIS_PASSWORD"
    ]  # fmt: skip
    ways = whole.of("NetworkPolicy")["redis"]["spec"]["ingress"]
    [way] = [way for way in ways if way["from"] == [{"podSelector": {"matchLabels": {"baton/ray": "head"}}}]]
    assert way["ports"] == [{"port": port["port"], "protocol": "TCP"}]


def test_the_example_for_keda_reads_an_exported_series() -> None:
    [shown] = re.findall(
        r"^```yaml\n(apiVersion: keda.*?)^```$", (ROOT / "docs/kubernetes.md").read_text(), re.M | re.S
    )
    example = yaml.safe_load(shown)
    crd_validator("keda.sh_scaledobjects.yaml", "v1alpha1").validate(example)
    [trigger] = example["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'max(baton_desired_workers{pool="decode"})'
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a dead Prometheus is not an empty cluster"
