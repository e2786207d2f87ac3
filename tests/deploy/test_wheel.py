"""The wheel that people install: `make dist` also starts its demo, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from deploy.dist import PACKAGES, build, serve_by_name
from protos.release import VERSION, commit


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_an_installed_wheel_answers_by_a_hubs_name(tmp_path: Path) -> None:
    """`pip install` and `baton up NAME` are all that it takes; `make dist` downloads what the wheel needs, too."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    subprocess.run([home / "bin" / "pip", "install", "--quiet", "--no-deps", build(tmp_path)], check=True)
    needed = sysconfig.get_path("purelib")  # without its .pth files, by which this checkout would be found
    answers = serve_by_name(home / "bin" / "baton", tmp_path, PYTHONPATH=needed)
    assert answers.keys() == {"acme/tiny", "acme/tiny:Q4_K_M"}
    assert all(answer.startswith("Test whether a") for answer in answers.values()), answers


def test_a_wheel_has_all_that_runs_and_says_its_commit(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert wheel.name == f"baton_serve-{VERSION}-py3-none-any.whl"
    installed = tmp_path / "installed"
    with ZipFile(wheel) as file:
        file.extractall(installed)
        names = file.namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == PACKAGES
    assert "demo/model/model.safetensors" in names
    assert not [name for name in names if name.startswith(("demo/eagle3", "demo/medusa"))]
    said = subprocess.run(
        [sys.executable, "-c", "from cluster.entry import main; main()", "--version"], cwd=tmp_path, check=True,
        capture_output=True, text=True, env={"PYTHONPATH": str(installed)},
    ).stdout  # fmt: skip
    assert said.split()[:4] == ["baton", VERSION, "(commit", f"{commit()[:10]}),"]
