"""Where tests get processes that start in milliseconds: they are forked from one that has imported torch and Baton."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.cluster.half", "tests.cluster.lane_peer"])
