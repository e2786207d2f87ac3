"""The policies by name. A new policy is a function `(RouterConfig) -> Policy` and a line of `_POLICIES`.

Modules of policies import numpy: they are imported when a policy is made, and not by a command that only checks names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from protos.errors import Misconfigured
from protos.hints import nearest
from router.config import RouterConfig

if TYPE_CHECKING:
    from router.policies.base import Policy

_POLICIES = {
    "round_robin": "router.policies.basic:round_robin",
    "least_loaded": "router.policies.basic:least_loaded",
    "power_of_two": "router.policies.basic:power_of_two",
    "session_affinity": "router.policies.affinity:session_affinity",
    "longest_prefix": "router.policies.longest_prefix:longest_prefix",
    "prefix_aware": "router.policies.prefix_aware:prefix_aware",
    "slo": "router.policies.slo:slo",
}
NAMES = tuple(_POLICIES)


def policy_of(config: RouterConfig, name: str = "") -> Policy:
    """The policy of that name, or the one that the configuration names. Raises Misconfigured for an unknown name."""
    name = name or config.policy
    check_name(name)
    module, function = _POLICIES[name].split(":")
    return cast("Callable[[RouterConfig], Policy]", getattr(import_module(module), function))(config)


def shadow_names(config: RouterConfig) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(name for one in config.shadow_policy.split(",") if (name := one.strip())))


def check_names(config: RouterConfig) -> None:
    """The deciding policy and the shadow policies. Raises Misconfigured."""
    check_name(config.policy)
    for name in shadow_names(config):
        check_name(name, "shadow_policy")


def check_name(name: str, setting: str = "policy") -> None:
    """Raises Misconfigured with the router's setting and the nearest name, or all names."""
    if name not in NAMES:
        near = nearest(name, NAMES)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(NAMES)}"
        raise Misconfigured(f"router.{setting}: there is no policy {name!r}: {hint}", param=f"router.{setting}")
