"""GET /admin/kv and POST /admin/workers/{id}/drain, as an operator's tools see them."""

from __future__ import annotations

import httpx

from protos.values import LaneStats, TicketStats, TierStats, WorkerLoad, WorkerRole, WorkerStats
from tests.unit.cluster.cli.test_status_verb import info
from tests.unit.router.scripted import Crew, Scripted, Worker, make_gateway, saying, serving

IN = TicketStats(ticket_id="a.1", generation=1, state="sending", owner="prefill-0#1", age_s=1.5, num_bytes=4096)
OUT = TicketStats(
    ticket_id="a.1", generation=1, state="pushing", owner="decode-0#1", age_s=2.5, num_bytes=4096, direction="out"
)
LANE = LaneStats(peer="prefill-0#1", transport="gloo", state="open", num_bytes=8192, busy_s=0.5, idle_s=0.25)
HOST = TierStats(tier="host", num_blocks=64, num_used=2, num_cached=40, num_evicted=7, num_loaded=9, num_hit_tokens=99)
PREFILL, DECODE = info("prefill-0", WorkerRole.PREFILL), info("decode-0", WorkerRole.DECODE)


def crew() -> Crew:
    made = Crew(
        Worker(worker_id="prefill-0", info=PREFILL), Worker(worker_id="decode-0", info=DECODE), Worker(worker_id="mute")
    )
    made.held["prefill-0"] = WorkerStats(info=PREFILL, load=WorkerLoad(), tickets=(OUT,))
    made.held["decode-0"] = WorkerStats(info=DECODE, load=WorkerLoad(), tickets=(IN,), lanes=(LANE,), tiers=(HOST,))
    return made


async def test_every_ticket_is_shown_with_its_age_owner_and_bytes() -> None:
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=crew())) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        told = (await client.get(f"{url}/admin/kv")).json()
    assert (told["num_tickets"], told["num_bytes_reserved"], told["oldest_s"]) == (2, 4096, 2.5)
    prefill, decode, mute = told["workers"]
    assert [ticket["direction"] for ticket in prefill["tickets"]] == ["out"]
    (ticket,) = decode["tickets"]
    assert ticket == {
        "ticket_id": "a.1", "generation": 1, "state": "sending", "owner": "prefill-0#1", "age_s": 1.5,
        "num_bytes": 4096, "direction": "in",
    }  # fmt: skip
    assert decode["lanes"][0]["transport"] == "gloo"
    assert decode["tiers"] == [
        {
            "tier": "host", "num_blocks": 64, "num_used": 2, "num_cached": 40, "num_evicted": 7, "num_loaded": 9,
            "num_hit_tokens": 99,
        }
    ]  # fmt: skip
    assert (mute["tickets"], mute["lanes"], mute["tiers"]) == (None, None, None), (
        "a worker that does not answer holds up nobody"
    )


async def test_a_worker_is_drained_by_its_name() -> None:
    fleet = crew()
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=fleet)) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        taken = await client.post(f"{url}/admin/workers/decode-0/drain")
        unknown = await client.post(f"{url}/admin/workers/decode-9/drain")
    assert (taken.status_code, taken.json()) == (202, {"worker_id": "decode-0", "num_running": 3})
    assert unknown.status_code == 404
    assert fleet.drained == ["decode-0"]


async def test_a_profile_refuses_parameters_that_it_would_ignore() -> None:
    async with serving(make_gateway(Scripted(saying("hi")), fleet=crew())) as url, httpx.AsyncClient() as client:
        for asked in ({"params": {"steps": "many"}}, {"json": {"steps": 5}}):
            answer = await client.post(f"{url}/admin/profile", **asked)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "unsupported_parameter"
            assert "POST begins a recording" in answer.json()["error"]["message"]
        assert (await client.post(f"{url}/admin/profile")).status_code == 200
