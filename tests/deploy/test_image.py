"""The container image, read as `docker build` reads it: the order of its layers, the last one, and how it is pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.rendering import K8S, ROOT

PACKAGES = ("cluster", "router", "workers", "prefill_pool", "decode_pool", "kvtransfer", "protos", "demo")
COMPILERS = re.compile(r"(?<!\S)(?:gcc|g\+\+|clang|build-essential)(?!\S)")


def read_stages() -> dict[str, list[str]]:
    """The instructions of each stage, continued lines joined; those before the first FROM are of stage ""."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if match := re.fullmatch(r"FROM (\S+)(?: AS (\S+))?", line):
            name = match[2] or "final"
            stages[name] = []
        stages[name].append(line)
    return stages


def test_dependencies_are_installed_before_any_source_is_copied() -> None:
    build = read_stages()["build"]
    [installs] = [number for number, line in enumerate(build) if "--dependencies-only" in line]
    before = {word for line in build[:installs] if line.startswith("COPY") for word in line.split()[1:-1]}
    assert before == {"pyproject.toml", "constraints.txt", "constraints-cuda.txt", "LICENSE", "deploy/install.py"}
    copied = {line.split()[1] for line in build[installs:] if line.startswith("COPY")}
    assert copied >= set(PACKAGES)
    last = build[-1]
    assert "--no-deps" in last


def test_the_cpu_image_has_no_compiler_and_the_gpu_image_has_c() -> None:
    stages = read_stages()
    assert set(stages) == {"", "build", "run-cpu", "run-cuda", "final"}
    assert COMPILERS.search(" ".join(stages["build"]))
    for name in ("run-cpu", "final"):
        assert not COMPILERS.search(" ".join(stages[name])), name
    assert "gcc" in " ".join(stages["run-cuda"]), "Triton compiles the launchers of its kernels"
    final = " ".join(stages["final"])
    [folder] = re.findall(r"BATON_PREBUILT=(\S+)", final)
    assert f"COPY --from=build {folder} {folder}" in stages["final"]
    assert f"deploy/prebuild.py {folder}" in stages["build"][-1]


def test_a_model_is_the_only_argument_and_its_files_are_kept() -> None:
    final = read_stages()["final"]
    assert 'ENTRYPOINT ["baton", "up", "--host", "0.0.0.0"]' in final
    [home] = re.findall(r"HF_HOME=(\S+)", " ".join(final))
    assert f"VOLUME {home}" in final
    made = next(number for number, line in enumerate(final) if f"chown baton:baton {home}" in line)
    assert made < final.index("USER 10001") < final.index(f"VOLUME {home}"), "a volume takes the folder's owner"


def test_everything_in_c_is_built_ahead() -> None:
    script = (ROOT / "deploy" / "prebuild.py").read_text()
    listed = subprocess.check_output(["git", "ls-files", *(f"{name}/**.c" for name in PACKAGES)], cwd=ROOT, text=True)
    sources = set(listed.split())
    assert sources
    assert set(re.findall(r'"(\S+\.c)"', script)) == sources


def test_ray_and_baton_are_on_the_path_of_a_login_shell() -> None:
    """KubeRay before 1.4 starts containers with `bash -lc`; Debian's /etc/profile gives users this PATH."""
    login = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games".split(":")
    [link] = [line for line in read_stages()["final"] if line.startswith("RUN ln -s")]
    *programs, folder = link.split()[3:]
    assert programs == ["/venv/bin/baton", "/venv/bin/ray"]
    assert folder.rstrip("/") in login


def test_every_stage_uses_the_pinned_image() -> None:
    stages = read_stages()
    bases = {line.split()[1] for lines in stages.values() for line in lines if line.startswith("FROM")}
    assert bases == {"${BASE}", "run-${TORCH}"}
    [base] = [line.partition("=")[2] for line in stages[""] if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"python:3\.11-slim-\w+", base), "a release of Debian is named, too"


@pytest.mark.parametrize(
    ("tool", "script"),
    [
        ("docker", 'test "$1 $2" = "buildx version" || echo sha256:{digest}'),
        ("crane", 'test "$1" = digest && echo sha256:{digest}'),
        ("skopeo", 'test "$4" = docker://redis:7-alpine && echo sha256:{digest}'),
    ],
)
def test_an_image_is_pinned_to_the_digest_that_its_registry_has(tool: str, script: str, tmp_path: Path) -> None:
    digest = "ab" * 32
    (tmp_path / tool).write_text("#!/bin/sh\n" + script.format(digest=digest))
    (tmp_path / tool).chmod(0o755)
    for name in ("sh", "printf"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    done = subprocess.run(
        [K8S / "pin.sh", "redis:7-alpine"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"redis:7-alpine@sha256:{digest}\n"


def test_without_a_tool_that_asks_registries_nothing_is_pinned(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", K8S / "pin.sh", "redis:7-alpine"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "docker with buildx, crane or skopeo" in done.stderr
    assert os.access(K8S / "pin.sh", os.X_OK)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_for_systemd_is_valid(tmp_path: Path) -> None:
    unit = (ROOT / "deploy" / "baton.service").read_text()
    [command] = re.findall(r"^ExecStart=(\S+) up \$BATON_UP$", unit, re.MULTILINE)
    unit = unit.replace(command, "/bin/true").replace("User=baton", "User=root")
    (tmp_path / "baton.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "baton.service"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
