"""`baton status`: everything the gateway tells, in tables and as JSON, and one clear line where nobody is."""

from __future__ import annotations

import asyncio
import io
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.admin_client import find_model, open_client, request_json
from cluster.cli.main import main, make_app
from cluster.cli.status_verb import _fleet, planner_words, status_tables
from protos.errors import BatonError, Misconfigured
from protos.values import (
    DraftCounts,
    KVLayout,
    LaneAddress,
    LaneStats,
    PausedProposer,
    SpeculationLoad,
    TicketStats,
    TierStats,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
    WorkerStats,
)
from tests.unit.router.scripted import Crew, Scripted, Worker, make_gateway, saying, serving
from workers.kv.kinds import with_kv_dtype


def info(worker_id: str, role: WorkerRole) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=1,
        role=role,
        model="tiny",
        address="127.0.0.1:7000",
        layout=with_kv_dtype(
            KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"), "int8"
        ),
        lane=LaneAddress(worker_id=worker_id, incarnation=1, host="127.0.0.1", port=7001),
        max_model_len=256,
        vocab_size=512,
        process_id=4711,
        weights="gptq-int4-g128, 4.16 bits a weight",
    )


PREFILL = info("prefill-0", WorkerRole.PREFILL)
LOAD = WorkerLoad(
    num_running=3, num_waiting=2, queued_prefill_tokens=1234, num_free_blocks=48, num_blocks=64, num_tickets=1,
    prefill_tokens_per_s=5432.1, decode_step_s=0.0123, transfer_bytes=7_500_000,
)  # fmt: skip
TICKET = TicketStats(ticket_id="t-9", generation=2, state="sending", owner="prefill-0", age_s=1.5, num_bytes=65536)
LANE = LaneStats(peer="decode-0", transport="gloo", state="open", num_bytes=3_000_000, busy_s=0.5, idle_s=90.0)


def crew() -> Crew:
    made = Crew(
        Worker(worker_id="decode-10", info=info("decode-10", WorkerRole.DECODE), load=LOAD),
        Worker(worker_id="decode-9", state="lost", reason="it died", info=info("decode-9", WorkerRole.DECODE)),
        Worker(worker_id="prefill-0", info=PREFILL, load=LOAD),
        Worker(worker_id="decode-11", state="joining", reason="not met yet"),
    )
    made.held["prefill-0"] = WorkerStats(info=PREFILL, load=LOAD, tickets=(TICKET,), lanes=(LANE,))
    return made


async def ask(fleet: Crew, *flags: str) -> str:
    """The output of the command with a gateway's real HTTP face."""
    async with serving(make_gateway(Scripted(saying("hi")), fleet=fleet)) as url:
        arguments = ["status", "--url", url, *flags]
        result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, make_app(arguments), arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


async def test_tables_show_pools_workers_lanes_and_tickets() -> None:
    shown = rows(await ask(crew()))
    assert shown[0][:1] == ["tiny"]
    assert shown[1] == ["weights:", "gptq-int4-g128,", "4.16", "bits", "a", "weight"]
    assert ["KV:", "int8"] in shown[1:4]
    assert ["prefill", "1/1", "3", "2", "1,234", "16/64", "(25%)", "1", "7.5", "MB"] in shown
    assert ["decode", "1/2", "3", "2", "1,234", "16/64", "(25%)", "1", "7.5", "MB"] in shown
    assert ["unknown", "0/1", "0", "0", "0", "-", "0", "0", "B"] in shown
    order = [row[0] for row in shown if row and row[0].startswith(("prefill-", "decode-"))]
    assert order[:4] == ["prefill-0", "decode-9", "decode-10", "decode-11"], "by pool and number"
    worker = next(row for row in shown if row[:2] == ["prefill-0", "ready"])
    assert "4711" in worker, "whom `ps` calls by Ray's name"
    lane = next(row for row in shown if "gloo" in row)
    assert lane == ["prefill-0", "decode-0", "gloo", "open", "3.0", "MB", "6.0", "MB/s", "2", "min"]
    ticket = next(row for row in shown if "t-9" in row)
    assert ticket[:5] == ["prefill-0", "t-9", "(try", "2)", "sending"]


async def test_a_long_reason_is_told_below_the_table_and_cut() -> None:
    reason = "failed to connect to all addresses; " * 10
    shown = await ask(Crew(Worker(worker_id="prefill-9", state="lost", reason=reason, info=PREFILL)))
    assert ["prefill-9", "lost"] in [row[:2] for row in rows(shown)]
    assert "lost:" not in shown
    [told] = re.findall(r"^prefill-9: (failed to connect.* \.\.\.)$", shown, re.MULTILINE | re.DOTALL)
    assert 200 < len(told) < len(reason)


async def test_how_much_of_the_transfers_was_hidden_is_shown() -> None:
    load = replace(LOAD, transfer_s=2.0, transfer_hidden_s=1.5)
    shown = rows(await ask(Crew(Worker(worker_id="prefill-0", info=PREFILL, load=load))))
    assert ["prefill", "1/1", "3", "2", "1,234", "16/64", "(25%)", "1", "7.5", "MB", "(75%", "hidden)"] in shown


async def test_drafts_are_shown_by_source_and_position() -> None:
    ngram = DraftCounts(source="ngram", drafted_at=(100, 50), accepted_at=(80, 20))
    single = SpeculationLoad(num_rows=200, num_tokens=300, spared_s=3.0, spent_s=0.5, sources=(ngram,))
    other = SpeculationLoad(
        num_rows=200,
        num_tokens=300,
        sources=(DraftCounts(source="suffix", drafted_at=(10,), accepted_at=(1,)), replace(ngram, accepted_at=(0, 0))),
    )
    workers = [
        Worker(worker_id=name, info=info(name, WorkerRole.DECODE), load=replace(LOAD, speculation=load))
        for name, load in (("decode-0", single), ("decode-1", other))
    ]
    shown = rows(await ask(Crew(*workers)))
    assert ["decode", "ngram", "300", "33%", "40%,", "20%", "1.50", "2.5", "s"] in shown
    assert ["decode", "suffix", "10", "10%", "10%"] in shown
    assert "Speculation" not in await ask(crew())


async def test_paused_drafts_are_named_with_their_cost() -> None:
    paused = PausedProposer(source="eagle", num_steps=2048, spared_s=0.25, spent_s=1.5)
    load = replace(LOAD, speculation=SpeculationLoad(num_rows=200, num_tokens=210, paused=(paused,)))
    shown = await ask(Crew(Worker(worker_id="decode-0", info=info("decode-0", WorkerRole.DECODE), load=load)))
    expected = "decode-0: drafts of eagle are paused for 2,048 steps: they spared 0.25 s and took 1.50 s"
    assert expected in " ".join(shown.split())


async def test_held_kv_is_shown_with_each_tiers_use() -> None:
    fleet = crew()
    device = TierStats(tier="device", num_blocks=64, num_used=16, num_cached=1234, num_evicted=5, num_hit_tokens=4096)
    fleet.held["prefill-0"] = WorkerStats(info=PREFILL, load=LOAD, tickets=(TICKET,), tiers=(device,))
    shown = rows(await ask(fleet, "--kv"))
    assert ["prefill-0", "device", "16/64", "(25%)", "1,234", "4,096", "tokens", "5", "0"] in shown
    assert ["no", "answer", "from", "decode-10,", "decode-9,", "decode-11"] in shown


async def test_why_a_lane_is_slow_or_in_quarantine_is_shown() -> None:
    fleet = crew()
    slow = replace(LANE, reason="no memory in common")
    hung = replace(LANE, state="quarantined", reason="nothing moved for 5 s")
    fleet.held["prefill-0"] = WorkerStats(info=PREFILL, load=LOAD, lanes=(slow, hung))
    shown = await ask(fleet)
    assert "gloo: no memory in common" in shown
    assert "quarantined: nothing moved for 5 s" in shown


async def test_a_lost_workers_last_load_is_not_shown() -> None:
    lost = Worker(worker_id="prefill-0", state="lost", reason="it died", info=PREFILL, load=LOAD)
    [row] = [row for row in rows(await ask(Crew(lost))) if row[:2] == ["prefill-0", "lost:"]]
    assert row[-6:] == ["-"] * 6


async def test_why_a_worker_is_lost_is_shown() -> None:
    shown = await ask(crew())
    assert "lost: it died" in shown
    assert "5,432" in shown
    assert "12.3 ms" in shown


async def test_a_cluster_that_cannot_serve_says_why() -> None:
    fleet = Crew(Worker(worker_id="decode-0", state="joining", reason="reads weights"))
    fleet.is_ready = False
    assert "not ready: decode-0 is joining (reads weights)" in await ask(fleet)


def decode(worker_id: str, state: str = "ready", reason: str = "") -> Worker:
    return Worker(worker_id=worker_id, state=state, reason=reason, info=info(worker_id, WorkerRole.DECODE))


DRAINED = Worker(worker_id="prefill-0", state="drained", reason="its successor is due", info=PREFILL)
NEVER_MET = Worker(worker_id="prefill-0", state="lost", reason="Connection refused")


@pytest.mark.parametrize(
    ("workers", "degraded"),
    [
        (
            [DRAINED],
            "no prefill worker is ready, the others read prompts themselves meanwhile: prefill-0 is drained "
            "(its successor is due)",
        ),
        ([decode("decode-0"), NEVER_MET], "never met: prefill-0 is lost (Connection refused)"),
        ([decode("decode-0"), decode("decode-1", "lost", "no progress")], "decode-1 is lost (no progress)"),
    ],
)
async def test_a_gateway_that_serves_says_who_is_away(workers: list[Worker], degraded: str) -> None:
    fleet = Crew(*workers)
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=fleet)) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        served = (await client.get(f"{url}/ready")).json()
        fleet.is_ready = False
        refused = (await client.get(f"{url}/ready")).json()
    assert (served["ready"], served["degraded"]) == (True, degraded)
    assert refused["degraded"] == ""


async def test_a_pool_that_others_stand_in_for_is_named() -> None:
    starting = "Connection refused; its successor is starting, 40% of its weights read"
    fleet = Crew(
        Worker(worker_id="prefill-0", info=PREFILL),
        Worker(worker_id="decode-0", state="lost", reason=starting, info=info("decode-0", WorkerRole.DECODE)),
    )
    headline = " ".join((await ask(fleet)).split())
    assert f"meanwhile: decode-0 is lost ({starting})" in headline
    assert "the others stand in and serve whole requests meanwhile" in headline


async def test_a_flipped_worker_and_a_sleeping_fleet_are_shown() -> None:
    flipped = Crew(Worker(worker_id="prefill-0", info=info("prefill-0", WorkerRole.DECODE), load=LOAD))
    assert ["prefill-0", "(decode)", "ready"] in [row[:3] for row in rows(await ask(flipped))]
    resting = Crew()
    resting.workers, resting.sleeps = (), "the fleet is asleep: the first request is served in about 4 s"
    assert ": the fleet is asleep: the first request is served in about 4 s" in " ".join((await ask(resting)).split())


def test_the_planner_and_its_hold_are_shown() -> None:
    planner = {"least": {"prefill": 0, "decode": 1}, "most": {"prefill": 2, "decode": 4}, "manual_until_s": 0.0}
    capacity = {"changes": [], "waiting_for": [], "planner": planner}
    assert [str(line) for line in _fleet(capacity)] == ["planner: prefill 0 to 2, decode 1 to 4"]
    told = planner_words(planner | {"manual_until_s": 1200.0}, 600.0)
    assert re.fullmatch(r"prefill .*; an operator's change holds until \d\d:\d\d:00, for 10 min more", told)


async def test_json_is_all_of_it() -> None:
    status: dict[str, Any] = json.loads(await ask(crew(), "--json"))
    assert status["ready"] is True
    assert [worker["worker_id"] for worker in status["workers"]] == ["decode-10", "decode-9", "prefill-0", "decode-11"]
    assert status["kv"]["prefill-0"]["lanes"][0]["num_bytes"] == 3_000_000
    assert status["kv"]["prefill-0"]["tickets"][0]["state"] == "sending"
    assert status["kv"]["decode-9"] is None, "a worker that does not answer holds the rest up for nobody"


async def test_absent_parts_are_not_shown() -> None:
    shown = await ask(Crew())
    assert "Workers" in shown
    assert "Lanes" not in shown
    assert "Tickets" not in shown


@pytest.mark.parametrize("width", [30, 60, 80, 120])
async def test_a_narrow_terminal_breaks_no_name(width: int) -> None:
    """Columns that do not fit are left out with a note, or printed line by line."""
    fleet = crew()
    first, *others = fleet.workers
    fleet.workers = (replace(first, address="10.120.130.140:45678", state="lost", reason="nobody there"), *others)
    told = json.loads(await ask(fleet, "--json"))
    out = io.StringIO()
    Console(file=out, width=width).print(status_tables(told, "http://here"))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert words >= {"Workers", "prefill-0", "decode-9", "decode-11", "t-9", "gloo"}
    assert ("10.120.130.140:45678" in words) == (width != 60)
    assert ("shows" in words) == (width in (60, 80))


def test_a_cluster_with_keys_says_how_to_give_one() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": {"code": "invalid_api_key", "message": "You gave no key"}})

    client = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://gateway")
    with client:
        with pytest.raises(BatonError, match=r"You gave no key.*--api-key.*BATON_ADMIN_KEY"):
            request_json(client, "/admin/status")
        with pytest.raises(BatonError, match=r"You gave no key.*--api-key.*BATON_API_KEY"):
            find_model(client)


def test_a_missing_file_of_authorities_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "nothere.pem")
    with pytest.raises(Misconfigured, match=r"^SSL_CERT_FILE=nothere\.pem: that does not exist"):
        open_client("https://127.0.0.1:8000")
    open_client("http://127.0.0.1:8000").close()


async def test_a_server_that_does_not_speak_tls_is_not_said_to_be_away() -> None:
    async with serving(make_gateway(Scripted(saying("hi")))) as url:
        with open_client(url.replace("http:", "https:")) as client, pytest.raises(BatonError, match="but not with TLS"):
            await asyncio.to_thread(request_json, client, "/admin/status")


def test_an_empty_cluster_is_one_line() -> None:
    out = io.StringIO()
    told = {"model": "tiny", "ready": False, "reason": "no worker has joined yet", "workers": [], "kv": {}}
    Console(file=out, width=200).print(status_tables(told, "http://here"))
    assert out.getvalue() == "tiny at http://here is not ready: no worker has joined yet\n"


@pytest.mark.parametrize(
    ("url", "told", "code"),
    [
        ("http://127.0.0.1:{port}", "no cluster answers at http://127.0.0.1:{port}: start one with `baton up`", 1),
        ("http://no.such.host.invalid", "no cluster answers at http://no.such.host.invalid (", 1),
        ("http://127.0.0.1:{port}9", "give a server's root", 2),
        ("127.0.0.1:{port}", "give a server's root", 2),
        ("ftp://127.0.0.1:{port}", "give a server's root", 2),
    ],
)
def test_nobody_there_is_one_line(
    url: str,
    told: str,
    code: int,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["baton", "status", "--url", url.format(port=unused_tcp_port)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == code
    printed = capsys.readouterr()
    assert told.format(port=unused_tcp_port) in printed.err
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
