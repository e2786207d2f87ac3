"""The policies by name, as `baton serve --policy` and the configuration know them."""

from __future__ import annotations

from difflib import get_close_matches

from protos.errors import Misconfigured
from router.config import RouterConfig
from router.policies import basic, prefix_aware
from router.policies.base import Policy, Rank
from router.policies.limits import balanced
from router.policies.pair import ShortRemainder, pair

# name -> (how prompts' readers are ranked, how answers' writers are ranked)
RANKS: dict[str, tuple[Rank, Rank]] = {
    "round_robin": (basic.round_robin, basic.round_robin),
    "least_loaded": (basic.least_loaded, basic.least_loaded),
    "power_of_two": (basic.power_of_two, basic.power_of_two),
    "prefix_aware": (balanced(prefix_aware.reading), balanced(prefix_aware.writing)),
}


def policy_of(config: RouterConfig) -> Policy:
    """The policy a configuration names. Raises Misconfigured for an unknown one, with those there are."""
    if config.policy not in RANKS:
        near = get_close_matches(config.policy, RANKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RANKS)}"
        raise Misconfigured(f"router: there is no policy {config.policy!r}: {hint}", param="policy")
    read, write = RANKS[config.policy]
    short = ShortRemainder(max_tokens=config.local_prefill_tokens, max_share=config.local_prefill_share)
    return pair(config.policy, read=read, write=write, short=short)
