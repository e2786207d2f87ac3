"""What policies are called, without the policies: they have numpy, which a verb that only says what is wrong need not
load."""

from __future__ import annotations

from protos.errors import Misconfigured
from protos.hints import nearest
from router.config import RouterConfig

NAMES = (
    "round_robin", "least_loaded", "power_of_two", "session_affinity", "longest_prefix", "prefix_aware", "slo"
)  # fmt: skip


def shadow_names(config: RouterConfig) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(name for one in config.shadow_policy.split(",") if (name := one.strip())))


def check_names(config: RouterConfig) -> None:
    """Of the policy that decides and of those in the shadow. Raises Misconfigured."""
    check_name(config.policy)
    for name in shadow_names(config):
        check_name(name, "shadow_policy")


def check_name(name: str, setting: str = "policy") -> None:
    """Raises Misconfigured, naming the router's setting and whose name is near, or all."""
    if name not in NAMES:
        near = nearest(name, NAMES)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(NAMES)}"
        raise Misconfigured(f"router.{setting}: there is no policy {name!r}: {hint}", param=f"router.{setting}")
