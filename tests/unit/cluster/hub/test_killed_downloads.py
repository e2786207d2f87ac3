"""A download is killed at fifty points, and begins again each time: nothing is corrupt, and little is sent twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.cluster.forked import FORKS
from tests.unit.cluster.hub.fake_hub import FakeHub, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_KILLS = 50
CHUNK = 16_384  # more than a file's buffer: a chunk that was received is in the file
WEIGHTS = random.Random(0).randbytes(40 * CHUNK + 5)
FILES = {"config.json": b"{}", "tokenizer.json": b"{} ", "model.safetensors": WEIGHTS}


def download(url: str, cache: Path) -> None:
    """In a process of its own."""
    from huggingface_hub import constants

    from cluster.hub.download import local_model

    constants.HF_HUB_OFFLINE, constants.ENDPOINT, constants.HF_HUB_CACHE = False, url, str(cache)
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    local_model("acme/tiny")


class Killer:
    """Kills the process that downloads. `resent` is how many bytes may be sent again."""

    def __init__(self, hub: FakeHub, cache: Path) -> None:
        self._hub, self._cache = hub, cache
        self._process: BaseProcess | None = None
        self._draw = random.Random(5)
        self._countdown, self._settles = 0, True
        self.num_kills, self.resent = 0, 0
        hub.asked, hub.cut_at = self._asked, self._cut_at

    def attempt(self) -> bool:
        """Starts a download that is killed at some point, or (False) that has come to its end before."""
        if (kind := self._draw.randrange(4)) == 0:
            return self.run(countdown=self._draw.randrange(1, 16)) == -signal.SIGKILL
        self._settles = kind > 1  # the bytes are in the file; else some are on their way
        return self.run([self._draw.randrange(12 * CHUNK)], countdown=0) == -signal.SIGKILL

    def run(self, cuts: Sequence[int] = (), countdown: int = -1) -> int | None:
        """The exit code of a download that is killed after so many bytes of weights, or at that request."""
        self._hub.cuts, self._countdown = [*cuts], countdown
        self._process = FORKS.Process(target=download, args=(self._hub.url, self._cache))
        self._process.start()
        self._process.join()
        return self._process.exitcode

    def _asked(self, request: str) -> None:
        self._countdown -= self._countdown > 0
        if self._countdown == 0 and not self._hub.cuts:
            self._hub.cuts, self._countdown = [0], -1
            self._kill(0)

    def _cut_at(self, end: int) -> None:
        if self._countdown:  # killed at the request, or not to be killed
            return
        if self._settles:
            size = end if end == len(WEIGHTS) else end // CHUNK * CHUNK
            while self._arrived() < size and not self._is_whole():
                os.sched_yield()
            self._kill(end - size)
        else:
            self._kill(end - self._arrived())

    def _kill(self, resent: int) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self.num_kills += 1
        self.resent += resent

    def _arrived(self) -> int:
        return sum(path.stat().st_size for path in self._cache.rglob("*.incomplete"))

    def _is_whole(self) -> bool:
        return any(path.stat().st_size == len(WEIGHTS) for path in self._cache.rglob("blobs/*") if path.suffix == "")


def test_a_killed_download_resumes_and_is_never_corrupt(tmp_path: Path) -> None:
    with serving(FakeHub()) as hub:
        commit = hub.add("acme/tiny", FILES)
        folder = tmp_path / "models--acme--tiny" / "snapshots" / commit
        killer, num_downloads = Killer(hub, tmp_path), 0
        while killer.num_kills < NUM_KILLS:
            while killer.num_kills < NUM_KILLS and killer.attempt():
                if (folder / "model.safetensors").exists():
                    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
            assert killer.run() == 0
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
            num_downloads += 1
            shutil.rmtree(tmp_path / "models--acme--tiny")
    assert hub.sent - num_downloads * len(WEIGHTS) <= killer.resent
    assert hub.sent > num_downloads * len(WEIGHTS) // 2
