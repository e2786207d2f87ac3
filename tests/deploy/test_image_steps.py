"""The image's steps run where no engine is: a stage is this machine's Debian below an overlay, in a chroot, in place of
BASE. Its last stage serves as its user, and its health check passes. Takes minutes and root: BATON_TEST_IMAGE=1.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.deploy.rendering import ROOT
from tests.deploy.test_image import read_stages

ASKED = "BATON_TEST_IMAGE"
REASON = "" if os.environ.get(ASKED) else f"takes minutes: set {ASKED}=1"
pytestmark = [
    pytest.mark.skipif(bool(REASON) or os.geteuid() != 0, reason=REASON or "needs root"), pytest.mark.timeout(1800),
]  # fmt: skip

ARGUMENTS = {"TORCH": "cpu", "TORCH_INDEX": ""}
MOST_BYTES = 1_900_000_000
_INSIDE = """set -e
mount -t overlay overlay -o "lowerdir=/,upperdir=$1,workdir=$2" "$3"
mount -t proc proc "$3/proc"
mount --rbind /dev "$3/dev"
mount -t tmpfs tmp "$3/tmp"
ip link set lo up || true
workdir=$4
shift 4
exec chroot "$@"
"""
_ASK = """
import json, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen
for _ in range(600):
    try:
        urlopen("http://127.0.0.1:8000/ready", timeout=10)
        break
    except HTTPError:  # workers are starting
        time.sleep(0.5)
body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
url, kind = "http://127.0.0.1:8000/v1/chat/completions", {"content-type": "application/json"}
request = Request(url, json.dumps(body).encode(), kind)
print(json.load(urlopen(request, timeout=60))["usage"]["completion_tokens"])
"""


class Stage:
    """One stage of the Dockerfile, built from its instructions. `earlier`: those that it copies from."""

    def __init__(self, folder: Path, earlier: dict[str, Stage]) -> None:
        self._earlier = earlier
        self.upper, self._work, self._merged = (folder / name for name in ("upper", "work", "merged"))
        for path in (self.upper, self._work, self._merged):
            path.mkdir(parents=True)
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.user = "0"
        self.ends: dict[str, list[str]] = {}  # ENTRYPOINT and HEALTHCHECK
        self._folder = "/"
        python = self.upper / "usr" / "local" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to("/usr/bin/python3")

    def build(self, instructions: Sequence[str]) -> None:
        for line in instructions:
            verb, _, rest = line.partition(" ")
            match verb:
                case "RUN":
                    self.run(f"cd {self._folder} && {rest}", more=ARGUMENTS)
                case "COPY":
                    self._copy(rest.split())
                case "WORKDIR":
                    self._folder = rest
                    self._path(rest).mkdir(parents=True, exist_ok=True)
                case "ENV":
                    for pair in shlex.split(rest):
                        name, _, value = pair.partition("=")
                        self.environment[name] = value.replace("$PATH", self.environment["PATH"])
                case "USER":
                    self.user = rest
                case "ENTRYPOINT":
                    self.ends[verb] = json.loads(rest)
                case "HEALTHCHECK":
                    self.ends[verb] = json.loads(rest[rest.index("[") :])
                case "FROM" | "ARG" | "EXPOSE" | "VOLUME":
                    pass
                case _:
                    raise AssertionError(f"an instruction that this test does not know: {line}")

    def command(self, *command: str, more: dict[str, str] | None = None) -> list[str]:
        variables = [f"{name}={value}" for name, value in (self.environment | (more or {})).items()]
        inside = ["sh", "-c", _INSIDE, "sh", str(self.upper), str(self._work), str(self._merged), self._folder]
        user = ["--userspec", f"{self.user}:{self.user}"]
        return [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child"), *inside, *user, str(self._merged),
            "env", "-i", *variables, "sh", "-c", f'cd {self._folder} && exec "$@"', "sh", *command,
        ]  # fmt: skip

    def run(self, shell: str, more: dict[str, str] | None = None) -> str:
        own = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))
        }  # where packages are
        done = subprocess.run(
            self.command("sh", "-c", shell, more=own | (more or {})), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shell}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def _copy(self, words: list[str]) -> None:
        source = self._earlier[words.pop(0).removeprefix("--from=")].upper if words[0].startswith("--from") else ROOT
        *paths, target = words
        for path in paths:
            there, into = source / path.lstrip("/"), self._path(target)
            if there.is_dir():
                shutil.copytree(
                    there, into, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                into = into / there.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(there, into)

    def _path(self, path: str) -> Path:
        return self.upper / os.path.join(self._folder, path).lstrip("/")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, stages, built = tmp_path_factory.mktemp("image"), read_stages(), dict[str, Stage]()
    for name in ("build", "final"):
        built[name] = Stage(folder / name, built)
        if name == "build":
            built[name].run("apt-get update && apt-get install -y --no-install-recommends python3-venv")  # BASE has it
        built[name].build(stages[name])
    yield built["final"]
    shutil.rmtree(folder, ignore_errors=True)


def test_the_image_serves_as_its_user_and_its_health_check_passes(image: Stage) -> None:
    assert image.user == "10001"
    assert image.run("id -u && baton --version && ray --version").split()[0] == "10001"
    script = f"""
        "$@" & server=$!
        for _ in $(seq 600); do {shlex.join(image.ends["HEALTHCHECK"])} 2>/dev/null && break; sleep 0.5; done
        {shlex.join(image.ends["HEALTHCHECK"])}
        python -c {shlex.quote(_ASK)}
        kill -TERM $server
        wait $server; echo ended with $?
    """
    command = image.ends["ENTRYPOINT"]
    inside = image.command("sh", "-ec", script, "sh", *command)
    inside.insert(1, "--net")
    done = subprocess.run(inside, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout.split("\n")[-3:-1] == ["4", "ended with 0"], f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_the_image_is_small_and_its_code_is_not_its_users(image: Stage) -> None:
    added = [image.upper / name for name in ("venv", "app", "opt/baton")]
    num_bytes = sum(
        path.lstat().st_size
        for folder in added
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    sys.stdout.write(f"the image adds {num_bytes / 1e6:,.0f} MB to its base\n")
    assert num_bytes < MOST_BYTES
    assert not image.run("find /app /venv /opt/baton -writable -not -type l | head").split()
    assert re.search(r"bookworm$", read_stages()[""][0]), "a Debian as this machine's"
