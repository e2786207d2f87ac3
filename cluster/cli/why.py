"""`baton why REQUEST`: the route of a request, the predicted cost of every alternative, the measured times, and its
cache misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.cli.change.decisions import capacity_view
from cluster.cli.terminal_tables import Sheet, show
from protos.errors import Misconfigured
from router.routing.decision import cost_figure, shown_unit

RECENT = 20

# Terms of slo's costs (docs/routing.md). The lowest total is chosen.
MEANINGS = {
    "overhead": "what every first token takes there",
    "queue": "prompts before this one",
    "load": "of this prompt's tokens from host memory",
    "compute": "of this prompt's tokens that are not cached; overhead to compute add up to the predicted time",
    "displaced": "what others lose while it computes: the worker's other requests wait, and cached blocks are evicted",
    "imbalance": "for a worker that was sent more work than its pool's mean lately",
    "late_ttft": "for a first token that is later than the objective (router.ttft_ms, or the request's max_ttft_ms)",
    "decode": "of the answer's tokens, and what they slow down the answers beside it",
    "shortage": "the wait for KV blocks, where too few are free",
    "late_tpot": "for tokens that are further apart than the objective (router.tpot_ms)",
    "transfer": "until the KV has come from the prefill worker",
    "prefill": "the prefill worker's total",
}

View = Mapping[str, Any]


def why(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The x-baton-request-id of an answer, or its id.")
    ] = "",
    url: GatewayUrl = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The gateway's whole reply, as JSON.")] = False,
    api_key: AdminKey = "",
    capacity: Annotated[
        bool, typer.Option("--capacity", help="Why the fleet is as it is: the planner's decisions, and the changes.")
    ] = False,
) -> None:
    """Show why a request was routed as it was, and why its prompt was not cached. Without REQUEST: list the latest."""
    if capacity and request:
        raise Misconfigured("why: give either a request or --capacity", param="capacity")
    with open_client(url, api_key) as client:
        if capacity:
            report = request_json(client, "/admin/capacity")
            show(report, lambda: capacity_view(report), as_json=as_json)
            return
        if not request:
            fetched = request_json(client, f"/admin/requests?limit={RECENT}")
            show(fetched, lambda: recent_table(fetched["requests"]), as_json=as_json)
            return
        path = f"/admin/requests/{quote(request, safe='')}"
        fetched = {**request_json(client, path), "cache": request_json(client, f"{path}/cache")["jobs"]}
    show(fetched, lambda: explanation(fetched), as_json=as_json)


def recent_table(requests: Sequence[View]) -> RenderableType:
    """The latest requests, one a line."""
    if not requests:
        return Text("No request has come to this gateway yet.")
    table = Sheet(
        "Requests", "request", "state", "prompt", "cached", "output", "TTFT", "between tokens", "prefill", "decode",
        spare=("between tokens", "cached", "output", "prompt"),
    )  # fmt: skip
    for one in requests:
        state = _state(one)
        table.add_row(
            one["request_id"],
            state,
            f"{one['prompt_tokens']:,}",
            f"{one['cached_tokens']:,}",
            "-" if one.get("embedding", False) else f"{one['output_tokens']:,}",
            _seconds(one["ttft_s"]),
            _seconds(one["tpot_s"]),
            one["prefill"] or "-",
            one["decode"] or "-",
        )
    return table


def explanation(answer: View) -> RenderableType:
    """Everything the gateway recorded of one request, by job."""
    misses = {one["job"]: one["miss"] for one in answer["cache"]}
    parts: list[RenderableType] = []
    for job in answer["jobs"]:
        parts += ["", _headline(job)] if parts else [_headline(job)]
        for choice in job["choices"]:
            parts += ["", _decision(choice, job.get("embedding", False)), _costs(choice)]
            parts += [_shadow(one) for one in choice["shadows"]]
        parts += _meanings(job["choices"])
        parts += ["", _timeline(job["timeline"], job.get("embedding", False))]
        if job["job"] in misses:
            parts += ["", *_cache(misses[job["job"]])]
    return Group(*parts)


def _headline(job: View) -> Text:
    state = _state(job)
    figures = f"{job['prompt_tokens']:,} prompt tokens, {job['cached_tokens']:,} of them cached; "
    figures += (
        "a vector, no tokens written" if job.get("embedding", False) else f"{job['output_tokens']:,} tokens written"
    )
    if job["drafted_tokens"]:
        figures += f", {job['accepted_drafts']:,} of them accepted of {job['drafted_tokens']:,} drafted"
    if job["paused_drafts"]:
        figures += f"; drafts of {', '.join(job['paused_drafts'])} were paused, since they did not pay"
    if job["ttft_s"] is not None:
        named = "computed in" if job.get("embedding", False) else "TTFT"
        figures += f"; {named} {_seconds(job['ttft_s'])}, from its arrival at the gateway"
    style = "green" if job["outcome"] in ("stop", "length") else "yellow" if not job["outcome"] else "red"
    heading = Text.assemble((job["request_id"], "bold"), f" ({job['job']}): ", (state, style), f". {figures}")
    if job.get("session"):
        heading.append(f"\nsession {job['session']}{' of ' + job['tenant'] if job.get('tenant') else ''}")
    return heading.append(f"\n{job['message']}") if job["message"] else heading


def _state(job: View) -> str:
    """Names the end of a job. A vector has no finish reason."""
    return "done" if job.get("embedding", False) and job["outcome"] == "length" else job["outcome"] or job["state"]


def _decision(choice: View, is_vector: bool) -> Text:
    if choice["decode"] is None:
        way = f"{choice['prefill']} answers, no worker decodes"
    elif choice["prefill"]:
        way = f"{choice['prefill']} prefills, {choice['decode']} decodes"
    else:
        way = f"{choice['decode']} alone"
    reason = f" ({choice['single_worker']})" if choice["single_worker"] else ""
    lines = [_predicted(f"decision to {'vector' if is_vector else 'first token'}", "ttft_s", choice)]
    lines += [] if is_vector else [_predicted("between tokens", "tpot_s", choice)]
    details = "".join(f"\n  {line}" for line in lines)
    return Text.assemble(f"after {_seconds(choice['at_s'])}, {choice['policy']}: ", (way, "bold"), f"{reason}{details}")


def _predicted(what: str, name: str, choice: View) -> str:
    """Leaves out decisions without a figure: those after the first token, and failed ones."""
    expected, measured = choice["expected"], (choice["measured"] or {}).get(name)
    load = f" (load {_seconds(expected['load_s'])})" if name == "ttft_s" and expected["num_host_tokens"] else ""
    expectation = f"{what} {_seconds(expected[name])}{load} expected"
    return f"{expectation}, {_seconds(measured)} measured" if measured is not None else expectation


def _costs(choice: View) -> Sheet:
    """Every candidate's total and terms, in one table for prefill and one for decode."""
    scores = _scores(choice)
    names = list(dict.fromkeys(name for one in scores for name in _terms(one)))
    cached = {one["worker_id"]: _cached(one) for one in choice["candidates"]}
    named, scale = shown_unit(choice["cost_unit"])
    unit = f" ({named})" if named else ""
    table = Sheet("", "worker", f"total{unit}", "role", "cached", *(f"{name}{unit}" for name in names))
    chosen = (choice["prefill"], choice["decode"])
    for one in sorted(scores, key=lambda one: (one["role"] != "prefill", one["total"])):
        terms = _terms(one)
        table.add_row(
            Text(one["worker_id"], "bold green" if one["worker_id"] in chosen else ""),
            cost_figure(scale * one["total"]),
            one["role"],
            cached.get(one["worker_id"], "0"),
            *(cost_figure(scale * terms[name]) if name in terms else "" for name in names),
        )
    return table


def _scores(choice: View) -> Sequence[View]:
    """Leaves out decode workers' scores if no worker decodes."""
    return [one for one in choice["scores"] if one["role"] != "decode" or choice["decode"] is not None]


def _meanings(choices: Sequence[View]) -> Iterator[Text]:
    names = {name for choice in choices for one in _scores(choice) for name in _terms(one)}
    for name, meaning in MEANINGS.items():
        if name in names:
            yield Text(f"  {name}: {meaning}", "dim")


def _cached(candidate: View) -> str:
    """Cached tokens, and how many of them are only in host memory."""
    host = f" ({candidate['num_host_tokens']:,} host)" if candidate["num_host_tokens"] else ""
    return f"{candidate['num_cached_tokens']:,}{host}"


def _terms(scored: View) -> Mapping[str, float]:
    """Adds up the columns of prefill, one for each prefill worker."""
    return {"prefill" if name.startswith("prefill by ") else name: cost for name, cost in scored["terms"].items()}


def _shadow(one: View) -> str:
    way = f"{one['prefill']} and {one['decode']}" if one["prefill"] else f"{one['decode']} alone"
    return f"{one['policy']} would have taken {way}: first token {1000 * one['ttft_difference_s']:+,.1f} ms"


def _timeline(events: Sequence[View], is_vector: bool) -> Sheet:
    table = Sheet("", "at", "what", "", prose=("",))
    of_answers = {"max_tokens", "tokens", "reason"} if is_vector else set()
    for event in events:
        facts = {name: value for name, value in event.items() if name not in {"at_s", "what"} | of_answers}
        what = "vector computed" if is_vector and event["what"] == "first token" else event["what"]
        more = ", ".join(f"{name} {value}" for name, value in facts.items() if value != "")
        table.add_row(f"{event['at_s']:.3f} s", what, more)
    return table


def _cache(miss: View) -> Iterator[RenderableType]:
    yield Text(
        f"cache of {miss['prefill_worker']}: "
        f"{miss['num_found']} of {miss['num_blocks']} blocks of {miss['block_size']} tokens found, "
        f"{miss['num_expected']} expected"
        + (f", {miss['num_expected_on_host']} of them in host memory" if miss["num_expected_on_host"] else "")
    )
    for finding in miss["findings"]:
        yield Text.assemble("  ", (finding["reason"], "bold"), f": {finding['explanation']}")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
