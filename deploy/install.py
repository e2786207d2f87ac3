"""Installs Baton into the virtual environment whose Python runs this file.

torch comes first: its CPU build, unless this machine has an NVIDIA driver. The build on pip's own index carries 2.5 GB
of CUDA. Where pip knows no CPU build, `uv` installs torch: it has the addresses of PyTorch's indexes built in, so that
this repository names none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))
SIZES = {"torch": "about 190 MB", "cpu": "about 160 MB", "cuda": "about 2.9 GB", "dev": "about 325 MB more"}
CONNECT_TIMEOUT_S = 10
SHOWN_LINES = 30  # of the log, when a step fails
DOING = re.compile(r"(?:Collecting|Downloading|Building|Installing|Preparing|Using cached|Processing) \S.*")


class InstallError(Exception):
    """A step ended with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Installer:
    """Runs one command a step. Prints one line a step; everything the commands print goes to the log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.log.write_text("")

    def step(self, label: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Raises InstallError."""
        print(label, flush=True)
        start = self.log.stat().st_size
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            settings = {"PIP_PROGRESS_BAR": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONWARNINGS": "ignore"}
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | settings | (environment or {}),
            )  # fmt: skip
            try:
                status = self._wait(child, start) if sys.stdout.isatty() else child.wait()
            except BaseException:
                child.terminate()
                child.wait()
                raise
        if status != 0:
            raise InstallError(status)

    def _wait(self, child: subprocess.Popen[bytes], start: int) -> int:
        """Until the child ends, shows the seconds and what pip does, on one line of the terminal."""
        began = time.monotonic()
        try:
            while True:
                try:
                    return child.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    found = DOING.findall(self.log.read_bytes()[start:].decode(errors="replace"))
                    line = f"  {time.monotonic() - began:3.0f} s  {found[-1] if found else ''}"
                    print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        finally:
            print("\r\033[K", end="", flush=True)

    def tell_failure(self) -> None:
        lines = self.log.read_text(errors="replace").splitlines()
        print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        print(f"Baton was not installed. The whole log: {self.log}", file=sys.stderr)


def has_nvidia_driver() -> bool:
    if any(path.exists() for path in DRIVER_FILES):
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True, check=False).returncode == 0


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", *arguments]


def installed_torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def install_cpu_torch(installer: Installer, version: str, index: str | None) -> None:
    """Installs the CPU build from `index`, from a place that pip knows, or from PyTorch's own index.

    Without `index`, a failure is printed and leaves torch to the next step. Raises InstallError where `index` has none.
    """
    wanted = f"torch=={version}+cpu"
    extra = ["--extra-index-url", index] if index else []
    try:
        installer.step(f"Installing torch {version}, CPU build ({SIZES['torch']})", pip(*extra, "--no-deps", wanted))
    except InstallError:
        if index:
            print(f"{wanted} is not at TORCH_INDEX={index}: name an index that has it", file=sys.stderr)
            raise
    else:
        return
    with tempfile.TemporaryDirectory() as folder:
        limits = {"UV_HTTP_RETRIES": "1", "UV_HTTP_CONNECT_TIMEOUT": str(CONNECT_TIMEOUT_S)}
        uv = [str(Path(folder) / "bin" / "uv"), "pip", "install", "--python", sys.executable, "--no-deps"]
        try:
            installer.step(
                "  pip knows no CPU build: fetching uv, which knows PyTorch's index (20 MB)",
                pip("--target", folder, "--no-deps", "--constraint", str(ROOT / "constraints.txt"), "uv"),
            )
            installer.step("  Installing it with uv", [*uv, "--torch-backend", "cpu", f"torch=={version}"], limits)
        except InstallError:
            print(
                f"  No CPU build of torch was found (log: {installer.log}); installing the CUDA build, 2.9 GB.\n"
                "  Ctrl-C stops this; TORCH_INDEX=URL names another index of torch's CPU builds",
                flush=True,
            )


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, f"constraints.txt pins {name}"
    return found[1]


def install(
    installer: Installer, *, build: str, index: str | None, extras: Sequence[str], dependencies_only: bool
) -> None:
    if build == "cpu" and sys.platform == "linux" and installed_torch() != f"{pinned('torch')}+cpu":
        install_cpu_torch(installer, pinned("torch"), index)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    extras = [*extras, *(["cuda"] if build == "cuda" else [])]
    wanted = [*settings["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    constraints = ROOT / ("constraints-cuda.txt" if build == "cuda" else "constraints.txt")
    size = SIZES["cpu" if installed_torch() == f"{pinned('torch')}+cpu" or sys.platform == "darwin" else "cuda"]
    sizes = f"{size}, {SIZES['dev']}" if "dev" in extras else size
    extra_index = ["--extra-index-url", index] if index else []
    installer.step(
        f"Installing what Baton needs{' and its development tools' if 'dev' in extras else ''} ({sizes})",
        pip(*extra_index, "--constraint", str(constraints), *wanted),
    )
    if not dependencies_only:
        installer.step("Installing Baton", pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="the build (auto: by driver)")
    parser.add_argument("--torch-index", metavar="URL", help="an index of torch's CPU builds")
    parser.add_argument("--extra", action="append", default=[], choices=("dev", "postgres"), help="more to install")
    parser.add_argument("--dependencies-only", action="store_true", help="all but Baton itself")
    options = parser.parse_args()
    build = options.torch if options.torch != "auto" else "cuda" if has_nvidia_driver() else "cpu"
    installer = Installer(Path(sys.prefix) / "install.log")
    try:
        install(
            installer, build=build, index=options.torch_index or None, extras=options.extra,
            dependencies_only=options.dependencies_only,
        )  # fmt: skip
    except InstallError as failed:
        installer.tell_failure()
        return failed.status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
