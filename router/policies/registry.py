"""The policies by name, as `baton serve --policy` and the configuration know them."""

from __future__ import annotations

from router.config import RouterConfig
from router.policies import affinity, basic, longest_prefix, prefix_aware, slo
from router.policies.base import Policy
from router.policies.costs import transfer_s
from router.policies.limits import balanced
from router.policies.names import check_name
from router.policies.pair import ShortRemainder, pair
from router.policies.table import Rank

# name -> (how prompts' readers are ranked, how answers' writers are ranked)
RANKS: dict[str, tuple[Rank, Rank]] = {
    "round_robin": (basic.round_robin, basic.round_robin),
    "least_loaded": (basic.least_loaded, basic.least_loaded),
    "power_of_two": (basic.power_of_two, basic.power_of_two),
    "session_affinity": (affinity.session_affinity, affinity.session_affinity),
    "longest_prefix": (longest_prefix.longest_prefix, longest_prefix.longest_prefix),
    "prefix_aware": (balanced(prefix_aware.reading), balanced(prefix_aware.writing)),
}


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
