"""Builds a wheel of this commit in dist/ and proves it: `make dist`.

The proof: a fresh virtual environment gets the wheel and what it needs. In an empty folder, with nothing of this
checkout on its path, it says its version, starts the demo, answers a request, and ends without leaving a process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from zipfile import ZipFile

from protos.release import commit

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"cluster", "router", "workers", "prefill_pool", "decode_pool", "kvtransfer", "protos", "demo"}
START_S, STOP_S = 300, 60


class NotProven(Exception):
    """The wheel does not do what it should."""


def build(folder: Path) -> Path:
    """Builds the wheel, with the commit in it. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:  # what git tracks, or would
        command = ["git", "ls-files", "-coz", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (name.split("/")[0] in PACKAGES or "/" not in name) and (ROOT / name).is_file():
                copy = Path(scratch) / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
        (Path(scratch) / "protos" / "commit.txt").write_text(commit())
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", scratch]
        subprocess.run([*command, "--wheel-dir", str(folder)], check=True, cwd=scratch)
    return max(folder.glob("baton_serve-*.whl"), key=lambda path: path.stat().st_mtime)


def check_names(wheel: Path, site: Path) -> None:
    """Raises NotProven if the wheel has other top-level names than Baton's, or another distribution has one of them."""
    with ZipFile(wheel) as file:
        names = {name.split("/")[0] for name in file.namelist() if ".dist-info" not in name.split("/")[0]}
    if names != PACKAGES:
        raise NotProven(f"the wheel has {sorted(names ^ PACKAGES)} more or less than {sorted(PACKAGES)}")
    for record in site.glob("*.dist-info/RECORD"):
        theirs = {line.split("/")[0] for line in record.read_text(encoding="utf-8").splitlines()} & PACKAGES
        if theirs and not record.parent.name.startswith("baton_serve-"):
            raise NotProven(f"{record.parent.name} has {sorted(theirs)}, too: Baton cannot be installed beside it")


def serve(baton: Path, folder: Path) -> str:
    """The demo's answer to a question, from a server that was started and stopped in the folder. Raises NotProven."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    server = subprocess.Popen(
        [baton, "up", "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    deadline, answer = time.monotonic() + START_S, ""
    try:
        for line in server.stdout:
            if address := re.search(r"http://\S+:\d+", line):
                body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
                request = urllib.request.Request(
                    f"{address[0].rstrip('/')}/v1/chat/completions", json.dumps({"model": "demo", **body}).encode(),
                    {"Content-Type": "application/json"},
                )  # fmt: skip
                with urllib.request.urlopen(request, timeout=deadline - time.monotonic()) as reply:
                    answer = json.load(reply)["choices"][0]["message"]["content"]
                break
        server.send_signal(signal.SIGINT)
        status = server.wait(STOP_S)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    if status or not answer:
        raise NotProven(f"baton up ended with {status}, and answered {answer!r}")
    return answer


def main() -> int:
    folder = ROOT / "dist"
    wheel = build(folder)
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-dist-") as scratch:
        home = Path(scratch) / "environment"
        venv.create(home, with_pip=True)
        python, baton = home / "bin" / "python", home / "bin" / "baton"
        subprocess.run([python, ROOT / "deploy" / "install.py", "--dependencies-only"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
        site = next((home / "lib").glob("python*/site-packages"))
        check_names(wheel, site)
        empty = Path(scratch) / "empty"
        empty.mkdir()
        print(
            subprocess.run([baton, "--version"], check=True, cwd=empty, capture_output=True, text=True).stdout.strip()
        )
        print(f"baton up answered {serve(baton, empty)!r} and stopped")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotProven as error:
        sys.exit(f"not proven: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}")
