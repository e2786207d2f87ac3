"""The wheel that people install: `make dist` also starts its demo, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from deploy.dist import PACKAGES, build
from protos.release import VERSION, commit


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
