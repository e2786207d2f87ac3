"""deploy/install.py chooses the build of torch. `pip` and `uv` are programs that record their arguments and install
nothing: the arguments decide between 0.3 GB and 2.9 GB."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL = ROOT / "deploy" / "install.py"
[TORCH] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

RECORDER = """#!{python}
import json, os, re, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
if {name!r} == "pip" and "--target" in sys.argv:
    folder = os.path.join(sys.argv[sys.argv.index("--target") + 1], "bin")
    os.makedirs(folder, exist_ok=True)
    os.symlink(os.environ["UV"], os.path.join(folder, "uv"))
print("a page of pip's words")
sys.exit(3 if re.search(os.environ["FAILING"] or "$^", " ".join([{name!r}, *sys.argv[1:]])) else 0)
"""


def write_program(path: Path, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDER.format(python=sys.executable, name=name))
    path.chmod(0o755)


class Machine:
    """A machine without torch. `run` gives what was printed and the commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        write_program(folder / "modules" / "pip" / "__main__.py", "pip")
        write_program(folder / "uv", "uv")
        (folder / "bin").mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)

    def give_driver(self) -> None:
        (self._folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\n")
        (self._folder / "bin" / "nvidia-smi").chmod(0o755)

    def run(
        self, *flags: str, failing: str = "", status: int = 0
    ) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        calls = self._folder / "calls"
        calls.unlink(missing_ok=True)
        environment: Mapping[str, str] = {
            "PYTHONPATH": str(self._folder / "modules"), "PATH": f"{self._folder / 'bin'}", "CALLS": str(calls),
            "UV": str(self._folder / "uv"), "FAILING": failing, "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        }  # fmt: skip
        python = self._folder / "venv" / "bin" / "python"
        done = subprocess.run([python, INSTALL, *flags], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done, [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    if any(path.exists() for path in (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))):
        pytest.skip("this machine has an NVIDIA driver")
    return Machine(tmp_path)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pip's own index has CPU builds")


@on_linux
def test_torch_is_the_cpu_build_where_there_is_no_driver(machine: Machine) -> None:
    done, calls = machine.run()
    torch, rest, baton = calls
    assert torch == ["pip", "install", "--no-deps", f"torch=={TORCH}+cpu"]
    assert not [line for line in rest if line.startswith("triton")], "200 MB that nothing on a CPU imports"
    assert baton[-2:] == ["--editable", str(ROOT)]
    assert "a page of pip's words" not in done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3


@on_linux
def test_torch_comes_from_pytorchs_index_if_pip_has_no_cpu_build(machine: Machine) -> None:
    _, calls = machine.run(failing=r"\+cpu")
    assert calls[2][0] == "uv"
    assert calls[2][-3:] == ["--torch-backend", "cpu", f"torch=={TORCH}"]
    assert [call[0] for call in calls] == ["pip", "pip", "uv", "pip", "pip"]


@on_linux
def test_without_a_cpu_build_one_line_names_the_replacement(machine: Machine) -> None:
    done, calls = machine.run(failing=r"\+cpu|^uv")
    assert calls[-2][:4] == ["pip", "install", "--constraint", str(ROOT / "constraints.txt")]
    assert "No CPU build of torch was found" in done.stdout
    assert "about 2.9 GB" in done.stdout


@on_linux
def test_a_named_index_is_the_only_one_asked(machine: Machine) -> None:
    done, calls = machine.run("--torch-index", "https://wheels.example/cpu", failing=r"\+cpu", status=3)
    assert [call[0] for call in calls] == ["pip"]
    assert calls[0][2:4] == ["--extra-index-url", "https://wheels.example/cpu"]
    assert f"torch=={TORCH}+cpu is not at TORCH_INDEX=https://wheels.example/cpu" in done.stderr


def test_a_machine_with_a_driver_gets_cuda(machine: Machine) -> None:
    machine.give_driver()
    _, calls = machine.run()
    assert str(ROOT / "constraints-cuda.txt") in calls[0]
    assert [call for call in calls[0] if call.startswith("triton")]
    assert not [call for call in calls if any("+cpu" in argument for argument in call)]


@pytest.mark.parametrize(("build", "constraints"), [("cpu", "constraints.txt"), ("cuda", "constraints-cuda.txt")])
def test_the_build_can_be_named(machine: Machine, build: str, constraints: str) -> None:
    """The building machine need not resemble the running ones."""
    machine.give_driver()
    _, calls = machine.run("--torch", build, "--dependencies-only")
    assert str(ROOT / constraints) in calls[-1]
    assert "--editable" not in calls[-1]


def test_a_failure_shows_the_end_of_the_log_and_its_path(machine: Machine) -> None:
    done, _ = machine.run(failing="--editable", status=3)
    assert "a page of pip's words" in done.stderr
    [log] = re.findall(r"The whole log: (\S+)", done.stderr)
    assert "a page of pip's words" in Path(log).read_text()
