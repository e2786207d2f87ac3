"""Room for connections: a gateway has two descriptors open for every plain stream (docs/adr/0022), and is often given
1,024 to start with."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("baton.cluster")

MOST = 2**20
ENOUGH = 4_096
"""Below it a busy gateway may run out of them."""


def raise_limit() -> int:
    """Lets this process, and those that it starts later, have as many files open as it may: its soft limit becomes the
    hard one. How many they are."""
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
