"""`baton bench --profile`: the workers' steps during the run as a Chrome trace (chrome://tracing, ui.perfetto.dev).

a process per worker  threads: engine (tick, plan, launch, fetch, apply, tell; KV gather, KV scatter), device, event
loop (send, encode) tracks: one for each lane ("KV to decode-0", "KV from prefill-0") counters: rows and tokens of each
step one more process      requests from sent to the last token, with a mark at the first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from cluster.bench.bench_report import RequestRecord
from cluster.bench.result_files import writing
from cluster.cli.admin_client import open_client, request_json

Mark = Callable[[Sequence[RequestRecord], float], None]
"""Called with the requests' outcomes and the start of their clock in seconds since 1970."""
Event = dict[str, Any]

_THREADS = ("engine", "device", "event loop")
_THREAD_OF = {"device": 1, "send": 2, "encode": 2}
_TOLD = ("step", "num_rows", "num_tokens", "num_read", "num_attended", "depth")
_LANES = {"KV send": "KV to", "KV receive": "KV from"}


@contextmanager
def profiling(path: Path | None, url: str, api_key: str) -> Iterator[Mark]:
    """Records the workers' steps while open, and writes the file when it closes.

    Raises Misconfigured if the file cannot be written, Unauthenticated or Forbidden without an administrator's key,
    Unavailable or NotFound for another server.
    """
    requests: list[Event] = []
    if path is None:
        yield lambda records, start_s: None
        return
    with open_client(url, api_key) as client:
        request_json(client, "/admin/profile", "POST")
        try:
            yield lambda records, start_s: requests.extend(_requests(records, start_s))
        finally:
            workers = request_json(client, "/admin/profile", "DELETE")["workers"]
    _say_missing(workers)
    _say_hidden(workers)
    with writing("profile", path):
        path.write_bytes(orjson.dumps(chrome_trace(workers, requests)))


def chrome_trace(workers: Sequence[Mapping[str, Any]], requests: Sequence[Event] = ()) -> dict[str, Any]:
    """Events have `ts` in seconds since 1970. Times in the trace are microseconds since the first event."""
    profiles = [(worker["worker_id"], worker["profile"]) for worker in workers if worker["profile"] is not None]
    starts = [span["start_s"] + profile["wall_offset_s"] for _, profile in profiles for span in profile["spans"]]
    origin_s = min([*starts, *(event["ts"] for event in requests)], default=0.0)
    events = [_named("process", 0, "requests")]
    events += [event | {"ts": _micros(event["ts"] - origin_s)} for event in requests]
    for pid, (worker_id, profile) in enumerate(profiles, 1):
        events.append(_named("process", pid, worker_id))
        events += [_named("thread", pid, name, tid=tid) for tid, name in enumerate(_THREADS)]
        shift_s = profile["wall_offset_s"] - origin_s
        for number, span in enumerate(profile["spans"]):
            events += _steps(span, pid, shift_s, f"{pid}.{number}")
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _steps(span: Mapping[str, Any], pid: int, shift_s: float, span_id: str) -> Iterator[Event]:
    """A span on a lane is asynchronous: chunks of several ranks overlap, and spans of a thread must nest."""
    start, end = _micros(span["start_s"] + shift_s), _micros(span["start_s"] + span["duration_s"] + shift_s)
    args = {name: span[name] for name in _TOLD if span.get(name)}
    if span.get("kv"):
        args |= _described(span["kv"])
    if direction := _LANES.get(span["name"]):
        name = f"{direction} {span['kv']['peer'].partition('#')[0]}"
        event = {"name": name, "cat": "lane", "id": span_id, "pid": pid, "tid": 0}
        yield event | {"ph": "b", "ts": start, "args": args}
        yield event | {"ph": "e", "ts": end}
        return
    place = {"pid": pid, "tid": _THREAD_OF.get(span["name"], 0)}
    yield {"name": span["name"], "ph": "X", "ts": start, "dur": round(end - start, 3), "args": args} | place
    if span["name"] == "device":
        for name, field in (("rows", "num_rows"), ("tokens", "num_tokens")):
            yield {"name": name, "ph": "C", "ts": start, "pid": pid, "args": {name: span[field]}}
            yield {"name": name, "ph": "C", "ts": end, "pid": pid, "args": {name: 0}}


def _described(kv: Mapping[str, Any]) -> Mapping[str, Any]:
    def of(what: str) -> str:
        first, count = kv[f"first_{what}"], kv[f"num_{what}s"]
        return str(first) if count == 1 else f"{first}-{first + count - 1}"

    args = {"peer": kv["peer"], "ticket": kv["ticket_id"], "blocks": of("block"), "layers": of("layer")}
    hidden = {"hidden_ms": round(kv["hidden_s"] * 1000, 3)} if kv["hidden_s"] else {}
    return args | {"bytes": kv["num_bytes"]} | hidden


def _requests(records: Sequence[RequestRecord], start_s: float) -> Iterator[Event]:
    for record in records:
        if record.sent_s is None or not record.arrivals_s:
            continue
        event = {"name": f"request {record.index}", "cat": "request", "id": record.index, "pid": 0, "tid": 0}
        args = {"prompt_tokens": record.num_prompt, "output_tokens": record.num_output, "error": record.error}
        yield event | {"ph": "b", "ts": start_s + record.sent_s, "args": args}
        yield event | {"name": "first token", "ph": "n", "ts": start_s + record.arrivals_s[0]}
        yield event | {"ph": "e", "ts": start_s + record.arrivals_s[-1]}


def _named(what: str, pid: int, name: str, tid: int = 0) -> Event:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _say_missing(workers: Sequence[Mapping[str, Any]]) -> None:
    errors = Console(stderr=True, soft_wrap=True)
    for worker in workers:
        if worker["profile"] is None:
            errors.print(f"{worker['worker_id']} did not answer: it is not in the profile", style="yellow")
        elif dropped := worker["profile"]["num_dropped"]:
            errors.print(f"{worker['worker_id']} has kept its latest spans only: {dropped} are missing", style="yellow")


def _say_hidden(workers: Sequence[Mapping[str, Any]]) -> None:
    spans = [span for worker in workers if worker["profile"] is not None for span in worker["profile"]["spans"]]
    sent = [span for span in spans if span["name"] == "KV send"]
    travelled_s = sum(span["duration_s"] for span in sent)
    if travelled_s > 0:
        num_bytes = sum(span["kv"]["num_bytes"] for span in sent)
        hidden = sum(span["kv"]["hidden_s"] for span in sent) / travelled_s
        summary = f"KV: {num_bytes / 1e6:,.1f} MB in {travelled_s * 1000:,.1f} ms on lanes, {hidden:.0%} of it"
        Console(stderr=True, soft_wrap=True).print(f"{summary} while its prompt was still computed", highlight=False)
