"""Who may reach what in the cluster, with which key, and what a pod does before it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from cluster.cli.main import make_app
from router.auth.tenants import hash_of, read_roster
from tests.cluster.redis_server import RedisServer
from tests.deploy.rendering import K8S, POOLS, Manifest, Rendered, config_of, ray_help, selected

SECRET = "baton-keys"


@pytest.fixture(scope="module")
def secret() -> Manifest:
    """The output of `secrets.sh acme`."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [K8S / "secrets.sh", "acme"], env=os.environ | {"PATH": tools}, capture_output=True, text=True, check=True
    )
    made: Manifest = yaml.safe_load(done.stdout)
    return made


def variables(container: Manifest) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in container.get("env", ())}


def key_of(variable: Any) -> str:
    """The Secret's key for the variable."""
    reference = variable["secretKeyRef"]
    assert reference["name"] == SECRET
    assert "optional" not in reference, "a pod without its key waits for the Secret: it does not start open"
    return str(reference["key"])


# -- keys --------------------------------------------------------------------------------------------------------------


def test_requests_and_admin_need_keys_that_the_secret_holds(shape: Rendered, secret: Manifest, tmp_path: Path) -> None:
    folder, _, file = config_of(shape).router.tenants.rpartition("/")
    mounts = {mount["mountPath"]: mount["name"] for mount in shape.containers["gateway"]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in shape.templates["gateway"]["spec"]["volumes"]}
    source = volumes[mounts[folder]]["secret"]
    assert source["secretName"] == SECRET
    assert "optional" not in source
    [item] = source["items"]
    assert item == {"key": item["key"], "path": file}, "no plain key is in the gateways' pods"
    (tmp_path / file).write_text(secret["stringData"][item["key"]])
    roster = read_roster(tmp_path / file)
    assert not roster.is_open
    admin, client = (secret["stringData"][name] for name in ("admin-key", "client-key"))
    assert roster.is_admin(admin)
    assert not roster.is_admin(client)
    tenant = roster.tenant_of(client)
    assert tenant is not None
    assert tenant.name == "acme"


def test_the_secret_is_valid_new_each_time_and_in_no_file(shape: Rendered, secret: Manifest) -> None:
    kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
    assert secret["metadata"]["name"] == SECRET
    values = [secret["stringData"][name] for name in ("admin-key", "client-key", "redis-password", "ray-token")]
    assert len(set(values)) == 4
    assert all(len(value) >= 43 for value in values), "256 bits"
    assert hash_of(values[0]) in secret["stringData"]["tenants.toml"]
    assert "Secret" not in {manifest["kind"] for manifest in shape.manifests}, "it would be the same for everybody"


def test_every_key_that_a_pod_wants_is_in_the_secret(shape: Rendered, secret: Manifest) -> None:
    wanted = {
        (name, variable): key_of(value)
        for name, container in shape.containers.items()
        for variable, value in variables(container).items()
        if isinstance(value, dict) and "secretKeyRef" in value
    }
    assert set(wanted.values()) <= secret["stringData"].keys()
    ray = {(name, "RAY_AUTH_TOKEN"): "ray-token" for name in ("controller", "head", *POOLS)}
    redis = {(name, "BATON_REDIS_PASSWORD"): "redis-password" for name in ("controller", "gateway")}
    assert wanted == ray | redis | {("redis", "REDISCLI_AUTH"): "redis-password"}
    for name in ("controller", "head", *POOLS):
        assert variables(shape.containers[name])["RAY_AUTH_MODE"] == "token", name


def test_redis_lets_nobody_in_without_its_password(shape: Rendered, tmp_path: Path) -> None:
    """The container's own command and probe, run here."""
    container = shape.containers["redis"]
    server = RedisServer(tmp_path)  # for its port
    [script] = container["args"]
    assert script.count("redis-server -") == 1
    here = script.replace("redis-server -", f"redis-server - --port {server.port} --bind 127.0.0.1 --dir {tmp_path}")
    environment = os.environ | {"REDISCLI_AUTH": "s3cret"}
    [probe] = {tuple(container[kind]["exec"]["command"]) for kind in ("readinessProbe", "livenessProbe")}

    def healthy(environment: dict[str, str]) -> bool:
        command = [*probe[:-1], probe[-1].replace("redis-cli", f"redis-cli -p {server.port}")]
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0

    assert not healthy(environment)
    with subprocess.Popen([*container["command"], here], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("Ready to accept connections" in line for line in process.stdout)
            assert healthy(environment)
            assert not healthy(environment | {"REDISCLI_AUTH": ""})
            told = subprocess.run(
                ["ps", "-o", "args=", "-p", str(process.pid)], capture_output=True, text=True, check=True
            )
            assert "redis-server" in told.stdout, "it is the container's first process, which gets SIGTERM"
            assert "s3cret" not in told.stdout
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


# -- ways --------------------------------------------------------------------------------------------------------------


Ways = dict[str, dict[str, set[tuple[int, int]]]]


def ways_of(shape: Rendered, direction: str, side: str) -> Ways:
    """The allowed ports between pods (first and last; none: all)."""
    ways: Ways = {}
    for policy in shape.of("NetworkPolicy").values():
        own = selected(shape, policy["spec"]["podSelector"])
        assert own, policy["metadata"]["name"]
        assert (direction in policy["spec"]) <= (direction.title() in policy["spec"]["policyTypes"])
        for rule in policy["spec"].get(direction, ()):
            ports = {(port["port"], port.get("endPort", port["port"])) for port in rule.get("ports", ())}
            peers = [selected(shape, peer["podSelector"]) for peer in rule.get(side, ())]
            assert all(peers), f"{policy['metadata']['name']} names labels that nobody has"
            for pod in own:
                for other in set().union(*peers) if peers else {"anybody"}:
                    ways.setdefault(pod, {}).setdefault(other, set()).update(ports)
    return ways


def test_network_policies_open_exactly_the_ways_that_are_used(shape: Rendered) -> None:
    denied = shape.of("NetworkPolicy")["default-deny"]["spec"]
    assert (denied["podSelector"], denied["policyTypes"]) == ({}, ["Ingress", "Egress"])
    ways = ways_of(shape, "ingress", "from")
    each_other = {name: set[tuple[int, int]]() for name in ("head", *POOLS)}
    kernels = {(32768, 60999)}
    assert ways == {
        "gateway": {"anybody": {(8000, 8000), (8001, 8001)}},
        "redis": {"gateway": {(6379, 6379)}, "controller": {(6379, 6379)}},
        "head": each_other | {"controller": {(10001, 10001)}},
        **dict.fromkeys(POOLS, each_other | {"gateway": kernels, "controller": kernels}),
    }
    out = ways_of(shape, "egress", "to")
    assert {name: value.pop("anybody") for name, value in out.items()} == {key: {(53, 53)} for key in shape.templates}
    from_pods = [(source, target) for target, sources in ways.items() for source in sources if source != "anybody"]
    assert {(source, target) for source, targets in out.items() for target in targets} == set(from_pods)
    for source, target in from_pods:
        assert out[source][target] == ways[target][source], "who is let in gets out"


def test_gateways_reach_no_port_of_ray(shape: Rendered) -> None:
    [policy] = [value for name, value in shape.of("NetworkPolicy").items() if name == "ray-workers"]
    [rule] = [rule for rule in policy["spec"]["ingress"] if "ports" in rule]
    [opened] = rule["ports"]
    help_text = ray_help("start")
    of_ray = set(re.findall(r"--([a-z-]+-port) ", help_text))
    of_head = {"dashboard-port", "ray-client-server-port"}
    workers_own = {"min-worker-port", "max-worker-port"}  # Ray's defaults: 10002 to 19999
    for group in shape.groups.values():
        named = {name: int(value) for name, value in group["rayStartParams"].items() if name.endswith("-port")}
        assert named.keys() == of_ray - of_head - workers_own, "a port that is not named is any one"
        assert len(set(named.values())) == len(named)
        assert all(port < opened["port"] for port in named.values())
        assert not [port for port in named.values() if 10002 <= port <= 19999]


def test_grpc_clients_find_every_gateway(shape: Rendered) -> None:
    services = shape.of("Service")
    assert services["gateway-grpc"]["spec"]["clusterIP"] == "None"
    assert [port["targetPort"] for port in services["gateway-grpc"]["spec"]["ports"]] == ["grpc"]
    for name, service in services.items():
        if service["spec"].get("clusterIP") != "None":
            assert "grpc" not in [port["targetPort"] for port in service["spec"]["ports"]], name


# -- endings -----------------------------------------------------------------------------------------------------------


def test_a_pod_of_a_pool_drains_before_it_ends(shape: Rendered, tmp_path: Path) -> None:
    """The hook itself, with recorders for `ray` and `baton`: first nothing more is placed here, then work moves on."""
    for name in ("ray", "baton"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >>"$CALLS"\n')
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    for pool in POOLS:
        container, pod = shape.containers[pool], shape.templates[pool]["spec"]
        assert config_of(shape).supervision.grace_s < pod["terminationGracePeriodSeconds"] - 10
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        calls.unlink(missing_ok=True)
        subprocess.run(hook, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls)}, check=True)
        ran = calls.read_text().split("\n")[:-1]
        ray, baton = ran[1 : ran.index("baton")], ran[ran.index("baton") + 1 :]
        assert ray[0] == "drain-node"
        command = typer.main.get_command(make_app(["drain"]))
        made = command.get_command(typer.Context(command), "drain")  # type: ignore[attr-defined]
        read = made.make_context("drain", baton[1:]).params
        assert read["here"], "a pod has no administrator's key"
        assert read["timeout_s"] < pod["terminationGracePeriodSeconds"] - 10


def test_ray_knows_the_commands_of_the_hook(shape: Rendered) -> None:
    script = shape.containers["decode"]["lifecycle"]["preStop"]["exec"]["command"][-1]
    flags = set(re.findall(r"(--[a-z-]+)", script.partition(";")[0]))
    help_text = ray_help("drain-node")
    assert all(flag in help_text for flag in flags)
