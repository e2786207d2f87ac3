"""Raises the limit on file descriptors: a gateway has one open for each connection, and often starts with a limit of
1,024."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("baton.cluster")

MOST = 2**20
ENOUGH = 4_096
"""A busy gateway may run out of descriptors below this limit."""


def raise_limit() -> int:
    """Raises the soft limit on open files to the hard limit, for this process and its later children. Returns the
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < ENOUGH:
        log.warning(
            "this process may have %d files open: enough for about %d streams at a time; raise the hard limit "
            "(ulimit -Hn, LimitNOFILE) for more",
            soft, soft // 2,
        )  # fmt: skip
    return soft
