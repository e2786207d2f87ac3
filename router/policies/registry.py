"""The policies by name, as `baton serve --policy` and the configuration know them."""

from __future__ import annotations

from protos.errors import Misconfigured
from protos.hints import nearest
from router.config import RouterConfig
from router.policies import affinity, basic, longest_prefix, prefix_aware, slo
from router.policies.base import Policy
from router.policies.candidates import Rank
from router.policies.costs import transfer_s
from router.policies.limits import balanced
from router.policies.pair import ShortRemainder, pair

# name -> (how prompts' readers are ranked, how answers' writers are ranked)
RANKS: dict[str, tuple[Rank, Rank]] = {
    "round_robin": (basic.round_robin, basic.round_robin),
    "least_loaded": (basic.least_loaded, basic.least_loaded),
    "power_of_two": (basic.power_of_two, basic.power_of_two),
    "session_affinity": (affinity.session_affinity, affinity.session_affinity),
    "longest_prefix": (longest_prefix.longest_prefix, longest_prefix.longest_prefix),
    "prefix_aware": (balanced(prefix_aware.reading), balanced(prefix_aware.writing)),
}


NAMES = (*RANKS, "slo")


def policy_of(config: RouterConfig, name: str = "") -> Policy:
    """The policy that a configuration names, or the one of that name under this configuration.

    Raises Misconfigured for an unknown one, with those there are.
    """
    name = name or config.policy
    check_name(name)
    short = ShortRemainder(max_tokens=config.local_prefill_tokens, max_share=config.local_prefill_share)
    if name == "slo":
        objectives = slo.Objectives(ttft_s=config.ttft_ms / 1000, tpot_s=config.tpot_ms / 1000)
        read, write = slo.reading(objectives), slo.writing(objectives)
        return pair(name, read=read, write=write, short=short, between=transfer_s, tolerance=slo.TOLERANCE)
    read, write = RANKS[name]
    return pair(name, read=read, write=write, short=short)


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
