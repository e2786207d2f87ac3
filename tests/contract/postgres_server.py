"""A real Postgres for tests, on a socket in a folder of its own, as a user who is not root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

USER = "postgres"


class PostgresServer:
    """`stop` it at the end."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="baton-postgres-"))
        as_root = os.geteuid() == 0
        if as_root:
            shutil.chown(self._folder, USER, USER)
        data = self._folder / "data"
        drop = ["--reuid", USER, "--regid", USER, "--clear-groups"] if as_root else []
        self._prefix = ["setpriv", *drop, "--pdeathsig", "KILL"]
        subprocess.run(
            [*self._prefix, _program("initdb"), "--auth=trust", f"--username={USER}", "--no-sync", "-D", data],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._command = [
            *self._prefix, _program("postgres"), "-D", str(data), "-k", str(self._folder), "-c", "listen_addresses=",
            "-c", "fsync=off", "-c", "autovacuum=off",
        ]  # fmt: skip
        self.url = f"postgresql://{USER}@/postgres?host={self._folder}"
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        assert any("ready to accept connections" in line for line in self._process.stderr)

    def kill(self) -> None:
        """Without an end for its connections."""
        assert self._process is not None
        self._process.send_signal(3)  # its immediate shutdown
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)


def _program(name: str) -> str:
    """Debian keeps the server's programs out of PATH."""
    path = shutil.which(name) or max(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), default=None)
    assert path is not None, f"{name} is missing: .ci/packages installs Debian's package postgresql"
    return path
