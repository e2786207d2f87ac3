"""The manifests: valid, and in agreement with each other, with Baton's settings and flags, and with what Ray offers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml

from cluster.cli.main import make_app
from cluster.supervision.worker_placement import NodeResources, plan
from protos.release import VERSION
from protos.values import WorkerRole
from tests.deploy.rendering import (
    POOLS,
    ROOT,
    SHAPES,
    Rendered,
    check_schemas,
    config_of,
    ports_of,
    ray_help,
    selected,
)

OURS = ("gateway", "controller", "head", "prefill", "decode")


# -- every object by itself --------------------------------------------------------------------------------------------


def test_objects_follow_their_schemas_without_unknown_fields(shape: Rendered) -> None:
    kinds = [manifest["kind"] for manifest in shape.manifests]
    assert {"Namespace", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)
    check_schemas(shape)


def test_everything_is_in_one_namespace_and_labelled(shape: Rendered) -> None:
    for manifest in shape.manifests:
        if manifest["kind"] not in ("Namespace", "ConfigMap"):
            assert manifest["metadata"]["namespace"] == "baton", manifest["metadata"]["name"]
            assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "baton", manifest["metadata"]["name"]


def test_the_ray_cluster_is_built_as_kuberay_reads_it(shape: Rendered) -> None:
    [cluster] = shape.of("RayCluster").values()
    assert (cluster["apiVersion"], cluster["metadata"]["name"]) == ("ray.io/v1", "ray")
    assert set(shape.groups) == set(POOLS)
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert shape.ray["rayVersion"] == pinned[1], "what is in the image"
    for group in (shape.ray["headGroupSpec"], *shape.groups.values()):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "flags are texts"
        assert int(group["rayStartParams"]["object-store-memory"]) >= 75 * 2**20, "Ray's least"
        [container] = group["template"]["spec"]["containers"]
        assert "command" not in container, "KubeRay writes `ray start` there"
        assert "args" not in container


def test_parameters_are_flags_of_ray_start(shape: Rendered) -> None:
    told = ray_help("start")
    for group in (shape.ray["headGroupSpec"], *shape.groups.values()):
        for name in group["rayStartParams"]:
            assert f"--{name}" in told, f"`ray start` knows no --{name}"


# -- every container ---------------------------------------------------------------------------------------------------


def test_containers_run_unprivileged_and_read_only(shape: Rendered) -> None:
    assert set(shape.containers) == {*OURS, "redis"}
    for name, template in shape.templates.items():
        pod, container = template["spec"], shape.containers[name]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_containers_declare_their_resources(shape: Rendered) -> None:
    for name, container in shape.containers.items():
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, name
        assert "memory" in container["resources"]["limits"], name


def test_containers_are_watched_at_ports_they_have(shape: Rendered) -> None:
    for name, container in shape.containers.items():
        probes = [container[kind] for kind in ("livenessProbe", "readinessProbe", "startupProbe") if kind in container]
        assert "livenessProbe" in container, name
        assert "readinessProbe" in container or name == "controller", f"{name} would be sent work before it can do it"
        for probe in probes:
            where = probe.get("httpGet") or probe.get("tcpSocket")
            assert where is None or where["port"] in ports_of(container), name


def test_what_is_mounted_is_there_and_nobody_writes_models_or_settings(shape: Rendered) -> None:
    for name, template in shape.templates.items():
        volumes = {entry["name"]: entry for entry in template["spec"].get("volumes", ())}
        mounts = {mount["mountPath"]: mount for mount in shape.containers[name].get("volumeMounts", ())}
        assert {mount["name"] for mount in mounts.values()} == set(volumes), name
        if name != "redis":
            assert "emptyDir" in volumes[mounts["/tmp"]["name"]], "the root is read-only"
            assert {"name": "HOME", "value": "/tmp"} in shape.containers[name]["env"], "caches go below the home"
        for path in {"/etc/baton", "/etc/baton-keys", "/models"} & mounts.keys():
            assert mounts[path].get("readOnly") is True, name


def test_images_are_ours_of_one_version(rendered: Callable[[str], Rendered]) -> None:
    for name, tag in (("base", VERSION), ("gpu", f"{VERSION}-cuda")):
        assert {rendered(name).containers[container]["image"] for container in OURS} == {f"baton:{tag}"}


# -- with Baton's settings and flags -----------------------------------------------------------------------------------


def test_settings_are_read_by_the_real_loader(shape: Rendered) -> None:
    config = config_of(shape)
    http, grpc = (ports_of(shape.containers["gateway"])[name] for name in ("http", "grpc"))
    assert (config.router.host, config.router.port, config.router.grpc_port) == ("0.0.0.0", http, grpc)
    assert config.ray.pool_resources, "or any pod would get any worker"


def test_flags_of_containers_exist(shape: Rendered) -> None:
    for name, verb in (("gateway", "gateway"), ("controller", "pools")):
        [first, *flags] = shape.containers[name]["args"]
        assert first == verb
        command = typer.main.get_command(make_app([verb]))
        made = command.get_command(typer.Context(command), verb)  # type: ignore[attr-defined]
        made.make_context(verb, flags)  # raises for a flag that does not exist


def test_settings_and_the_heartbeat_are_where_flags_say(shape: Rendered) -> None:
    for name in ("gateway", "controller"):
        container = shape.containers[name]
        [path] = [arg.removeprefix("--config=") for arg in container["args"] if arg.startswith("--config=")]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in shape.templates[name]["spec"]["volumes"]}
        folder, _, file = path.rpartition("/")
        config_map = volumes[mounts[folder]]["configMap"]["name"]
        assert file in shape.of("ConfigMap")[config_map]["data"]
    controller = shape.containers["controller"]
    [beat] = [arg.removeprefix("--heartbeat=") for arg in controller["args"] if arg.startswith("--heartbeat=")]
    assert beat in controller["livenessProbe"]["exec"]["command"][-1]
    assert beat.rpartition("/")[0] in {mount["mountPath"] for mount in controller["volumeMounts"]}


def test_the_controllers_probe_distinguishes_fresh_heartbeats(shape: Rendered, tmp_path: Path) -> None:
    beat = tmp_path / "alive"
    command = [
        part.replace("/run/baton/alive", str(beat))
        for part in shape.containers["controller"]["livenessProbe"]["exec"]["command"]
    ]

    def healthy() -> bool:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert not healthy()
    beat.touch()
    assert healthy()
    os.utime(beat, (0, 0))
    assert not healthy()


def test_stopping_has_the_time_it_is_given(shape: Rendered) -> None:
    grace_s = config_of(shape).supervision.grace_s
    for name in ("gateway", "controller"):
        assert shape.templates[name]["spec"]["terminationGracePeriodSeconds"] > grace_s + 5, name


# -- with each other ---------------------------------------------------------------------------------------------------


def test_services_reach_pods_at_ports_they_have(shape: Rendered) -> None:
    for name, service in shape.of("Service").items():
        [pods] = selected(shape, {"matchLabels": service["spec"]["selector"]})
        assert pods == name.removesuffix("-grpc")
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(shape.containers[pods])


def test_addresses_in_the_settings_are_services_that_exist(shape: Rendered) -> None:
    config = config_of(shape)
    redis = shape.of("Service")["redis"]["spec"]["ports"][0]["port"]
    client = ports_of(shape.containers["head"])["client"]
    assert config.discovery == f"redis://redis:{redis}"
    assert config.index == config.discovery, "or each gateway learns what its own requests cached, and no more"
    assert config.ray.address == f"ray://ray-head-svc:{client}", "KubeRay's name for the head of a cluster named ray"


def test_deployments_select_their_own_pods(shape: Rendered) -> None:
    for name, deployment in shape.of("Deployment").items():
        assert selected(shape, deployment["spec"]["selector"]) == {name}


def test_budgets_cover_their_pods_and_allow_one_disruption(shape: Rendered) -> None:
    replicas = {name: value["spec"]["replicas"] for name, value in shape.of("Deployment").items()}
    replicas |= {pool: group["replicas"] for pool, group in shape.groups.items()}
    budgets = shape.of("PodDisruptionBudget")
    assert set(budgets) == {"gateway", *POOLS}
    for name, budget in budgets.items():
        assert selected(shape, budget["spec"]["selector"]) == {name}
        # For pods whose owner has no scale, as KubeRay's, Kubernetes counts minAvailable only.
        assert "maxUnavailable" not in budget["spec"]
        assert 1 <= budget["spec"]["minAvailable"] == replicas[name] - 1


# -- with Baton's placement --------------------------------------------------------------------------------------------


def nodes_of(shape: Rendered) -> list[tuple[str, dict[str, float]]]:
    """The resources of each Ray pod, as KubeRay passes them to `ray start`."""
    offered = [("head", {"CPU": float(shape.ray["headGroupSpec"]["rayStartParams"]["num-cpus"])})]
    for pool, group in shape.groups.items():
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        quoted = group["rayStartParams"]["resources"]
        custom = json.loads(json.loads(quoted))  # a JSON text within the quotes that the shell takes off
        node = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0)), **custom}
        offered += [(pool, dict(node)) for _ in range(group["replicas"])]
    return offered


def test_every_worker_of_the_settings_finds_its_pod(shape: Rendered) -> None:
    config, offered = config_of(shape), nodes_of(shape)
    plans = plan(
        config.pools,
        [NodeResources(cpus=has["CPU"], gpus=has.get("GPU", 0.0)) for _, has in offered],
        tp=config.worker.tp,
        device=config.worker.device,
        pool_resources=config.ray.pool_resources,
    )
    for planned in plans:
        needed: dict[str, float] = {}
        for bundle in planned.bundles():
            for name, amount in bundle.items():
                needed[name] = needed.get(name, 0.0) + amount
        home = next(
            (
                has
                for pool, has in offered
                if pool == planned.role and all(has.get(k, 0) >= v for k, v in needed.items())
            ),
            None,
        )
        assert home is not None, f"no pod has {needed} for {planned.worker_id}"
        for name, amount in needed.items():
            home[name] -= amount
    assert {planned.role for planned in plans} == {WorkerRole.PREFILL, WorkerRole.DECODE}
    assert len(plans) == len(offered) - 1, "every pod of Ray but the head has a worker: none stands idle"


def test_gpus_are_asked_for_and_the_model_is_on_the_volume(rendered: Callable[[str], Rendered]) -> None:
    shape = rendered("gpu")
    config = config_of(shape)
    claim = shape.of("PersistentVolumeClaim")["models"]["metadata"]["name"]
    assert config.worker.device == "cuda"
    assert config.worker.model.startswith("/models/")
    for pool in POOLS:
        assert shape.containers[pool]["resources"]["limits"]["nvidia.com/gpu"] == config.worker.tp
        spec = shape.templates[pool]["spec"]
        assert spec["nodeSelector"]
        assert spec["tolerations"]
        [memory] = [
            volume["emptyDir"] for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
        ]
        assert memory["sizeLimit"] == "8Gi"
    for name in ("gateway", *POOLS):
        volumes = {volume["name"]: volume for volume in shape.templates[name]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in shape.containers[name]["volumeMounts"]}
        assert volumes[mounts["/models"]]["persistentVolumeClaim"]["claimName"] == claim


def test_the_pod_that_fills_the_volume_may_run_in_the_namespace(rendered: Callable[[str], Rendered]) -> None:
    pod = yaml.safe_load((SHAPES["gpu"] / "fill.yaml").read_text())
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    worker = rendered("gpu").templates["prefill"]["spec"]
    assert pod["spec"]["securityContext"].items() >= worker["securityContext"].items()
    assert pod["spec"]["containers"][0]["securityContext"] == worker["containers"][0]["securityContext"]
    [volume] = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] in rendered("gpu").of("PersistentVolumeClaim")


def test_the_model_of_the_base_is_in_the_image(rendered: Callable[[str], Rendered]) -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    folder = Path(config_of(rendered("base")).worker.model).relative_to("/app")
    assert (ROOT / folder / "config.json").is_file()
    assert re.search(rf"^COPY {folder.parts[0]} {folder.parts[0]}$", dockerfile, re.MULTILINE)


@pytest.mark.parametrize(
    "package", ["cluster", "router", "workers", "prefill_pool", "decode_pool", "kvtransfer", "protos"]
)
def test_every_package_is_in_the_image(package: str) -> None:
    assert re.search(rf"^COPY {package} {package}$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
