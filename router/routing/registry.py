"""The policies by name. To add a policy, write a function `(RouterConfig) -> Policy` and a line of `_POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from protos.errors import Misconfigured
from protos.hints import nearest
from router.router_config import RouterConfig

if TYPE_CHECKING:
    from router.routing.decision import Policy

_POLICIES = {
    "round_robin": "router.routing.basic:round_robin",
    "least_loaded": "router.routing.basic:least_loaded",
    "prefix_aware": "router.routing.prefix_aware:prefix_aware",
    "slo": "router.routing.slo:slo",
}
NAMES = tuple(_POLICIES)


def policy_of(config: RouterConfig, name: str = "") -> Policy:
    name = name or config.policy
    check_name(name)
    module, function = _POLICIES[name].split(":")
    return cast("Callable[[RouterConfig], Policy]", getattr(import_module(module), function))(config)


def shadow_names(config: RouterConfig) -> list[str]:
    return list(dict.fromkeys(name for part in config.shadow_policy.split(",") if (name := part.strip())))


def check_names(config: RouterConfig) -> None:
    check_name(config.policy)
    for name in shadow_names(config):
        check_name(name, "shadow_policy")


def check_name(name: str, setting: str = "policy") -> None:
    if name not in NAMES:
        near = nearest(name, NAMES)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(NAMES)}"
        raise Misconfigured(f"router.{setting}: there is no policy {name!r}: {hint}", param=f"router.{setting}")
