"""Builds a wheel of this commit in dist/ and proves it: `make dist`.

The proof: a fresh virtual environment gets the wheel and what it needs. In an empty folder, with nothing of this
checkout on its path, it says its version, starts the demo, answers a request, and ends without leaving a process; then
the same by a name of a hub, with an empty cache.
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


def serve(baton: Path, folder: Path, *arguments: str, **settings: str) -> str:
    """The answer of `baton up ARGUMENTS` to a question, started and stopped in the folder. `settings` are environment
    variables. Raises NotProven."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    server = subprocess.Popen(
        [baton, "up", *arguments, "--port", "0"], cwd=folder, env=environment | settings, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    deadline, answer = time.monotonic() + START_S, ""
    try:
        for line in server.stdout:
            if address := re.search(r"http://[^/\s]+:\d+", line):
                answer = ask(address[0], deadline - time.monotonic())
                break
        server.send_signal(signal.SIGINT)
        status = server.wait(STOP_S)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.stdout.close()
    if status or not answer:
        raise NotProven(f"baton up {' '.join(arguments)} ended with {status}, and answered {answer!r}")
    return answer


def ask(url: str, timeout_s: float) -> str:
    """The answer of the first model that is served to the README's question."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout_s) as reply:
        model = json.load(reply)["data"][0]["id"]
    messages = [{"role": "user", "content": "What does `os.path.exists` do?"}]
    body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def serve_by_name(baton: Path, folder: Path, **settings: str) -> dict[str, str]:
    """The answers of the demo model by names of a hub on this machine, each in an empty folder with an empty cache of
    the hub. Raises NotProven."""
    from tests.gguf_models import convert
    from tests.unit.cluster.hub.fake_hub import FakeHub, serving

    model, answers = ROOT / "demo" / "model", dict[str, str]()
    file = convert(model, folder / "tiny-Q4_K_M.gguf", "Q4_K", others={"token_embd": "Q6_K", "attn_v": "Q6_K"})
    files = {path.name: path.read_bytes() for path in (*model.iterdir(), file)}
    with serving(FakeHub()) as hub:
        hub.add("acme/tiny", files)
        for name in ("acme/tiny", "acme/tiny:Q4_K_M"):
            place, cache = folder / f"{len(answers)}", folder / f"cache-{len(answers)}"
            place.mkdir()
            hub_settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
            answers[name] = serve(baton, place, name, **settings, **hub_settings)
            if any(place.iterdir()):
                raise NotProven(f"baton up {name} has left {[path.name for path in place.iterdir()]}")
    return answers


def main() -> int:
    folder = ROOT / "dist"
    wheel = build(folder)
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-dist-") as scratch:
        home = Path(scratch) / "environment"
        venv.create(home, with_pip=True)
        python, baton = home / "bin" / "python", home / "bin" / "baton"
        subprocess.run([python, ROOT / "deploy" / "install.py", "--dependencies-only"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        site = next((home / "lib").glob("python*/site-packages"))
        check_names(wheel, site)
        empty = Path(scratch) / "empty"
        empty.mkdir()
        print(
            subprocess.run([baton, "--version"], check=True, cwd=empty, capture_output=True, text=True).stdout.strip()
        )
        print(f"baton up answered {serve(baton, empty)!r} and stopped", flush=True)
        for name, answer in serve_by_name(baton, Path(scratch)).items():
            print(f"baton up {name} answered {answer!r} and stopped")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotProven as error:
        sys.exit(f"not proven: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}")
