"""Keys, tenants and their limits over HTTP and gRPC, as OpenAI's own client meets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from protos.errors import Misconfigured
from router.auth.auth import LOOK_S, AccessControl
from router.auth.tenants import hash_of, new_key
from router.faces.grpc.grpc_face import GrpcFace
from router.request_metrics import RequestMetrics
from tests.unit.router.scripted import Script, Scripted, make_gateway, saying, serving

ACME, GLOBEX, ADMIN = "sk-baton-acme", "sk-baton-globex", "sk-baton-admin"
TENANTS = f"""
admin_keys = ["{hash_of(ADMIN)}"]

[tenants.acme]
keys = ["{hash_of(ACME)}"]
max_priority = 3
requests_per_min = 2

[tenants.globex]
keys = ["{hash_of(GLOBEX)}"]
max_concurrent = 1
"""
PROMPT = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return path


@asynccontextmanager
async def visiting(
    path: Path | None, script: Script | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted]]:
    generate, metrics = Scripted(script or saying("hi")), RequestMetrics()
    gateway = make_gateway(generate, metrics=metrics, access=AccessControl(path, registry=metrics.registry))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        yield client, generate


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_openais_client_raises_the_right_errors(tenants: Path) -> None:
    async with visiting(tenants) as (visitor, _), openai.DefaultAsyncHttpxClient(verify=False) as http:

        def client(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{visitor.base_url}/v1", api_key=key, max_retries=0, http_client=http)

        with pytest.raises(openai.AuthenticationError, match="is unknown") as unknown:
            await client(new_key()).models.list()
        assert unknown.value.code == "invalid_api_key"
        assert (await client(ACME).completions.create(**PROMPT)).choices[0].text == "hi"  # type: ignore[call-overload]
        await client(ACME).completions.create(**PROMPT)  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError, match="2 requests a minute") as limited:
            await client(ACME).completions.create(**PROMPT)  # type: ignore[call-overload]
    assert limited.value.code == "rate_limit_exceeded"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 30


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
@pytest.mark.parametrize("given", [{}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}, bearing("x")])
async def test_without_a_known_key_nothing_of_the_api_answers(tenants: Path, path: str, given: dict[str, str]) -> None:
    async with visiting(tenants) as (client, generate):
        response = await client.get(path, headers=given)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not generate.jobs


async def test_health_and_metrics_need_no_key_and_admin_its_own(tenants: Path) -> None:
    async with visiting(tenants) as (client, _):
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        statuses = [
            (await client.get("/admin/status", headers=headers)).status_code
            for headers in ({}, bearing(ACME), bearing(ADMIN))
        ]
        refused = await client.get("/v1/models", headers=bearing(ADMIN))
    assert statuses == [401, 403, 200]
    assert refused.status_code == 401
    assert "admin key" in refused.json()["error"]["message"]


async def test_without_a_file_everything_is_open() -> None:
    async with visiting(None) as (client, _):
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        assert (await client.get("/admin/status")).status_code == 200


async def test_tenants_never_share_a_cache_and_each_shares_its_own(tenants: Path) -> None:
    async with visiting(tenants) as (client, generate):
        for key in (ACME, GLOBEX, ACME):
            await client.post("/v1/completions", json=PROMPT, headers=bearing(key))
    salts = [job.cache_salt for job in generate.jobs]
    assert salts[0] == salts[2] != salts[1]
    assert [job.tenant for job in generate.jobs] == ["acme", "globex", "acme"]


async def test_a_priority_above_the_tenants_is_refused(tenants: Path) -> None:
    async with visiting(tenants) as (client, _):
        refused = await client.post("/v1/completions", json=PROMPT | {"priority": 4}, headers=bearing(ACME))
        taken = await client.post("/v1/completions", json=PROMPT | {"priority": 3}, headers=bearing(ACME))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert taken.status_code == 200


async def test_a_tenant_runs_as_many_at_once_as_it_may(tenants: Path) -> None:
    gate, say = asyncio.Event(), saying("hi")
    async with visiting(tenants, lambda job: [gate, *say(job)]) as (client, generate):
        first = asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=bearing(GLOBEX)))
        await generate.began.wait()
        second = await client.post("/v1/completions", json=PROMPT, headers=bearing(GLOBEX))
        gate.set()
        assert (await first).status_code == 200
        third = await client.post("/v1/completions", json=PROMPT, headers=bearing(GLOBEX))
    assert (second.status_code, third.status_code) == (429, 200)
    assert len(generate.jobs) == 2


async def test_tenants_use_is_counted_by_kind(tenants: Path) -> None:
    async with visiting(tenants) as (client, generate):
        await client.post("/v1/completions", json=PROMPT, headers=bearing(ACME))
        told = (await client.get("/metrics")).text
    num_prompt = len(generate.jobs[0].prompt_ids)
    for kind, count in (("cached", num_prompt // 2), ("input", num_prompt - num_prompt // 2), ("output", 3)):
        assert f'baton_tenant_tokens_total{{kind="{kind}",tenant="acme"}} {float(count)}' in told


async def test_a_key_that_is_taken_back_lets_nobody_in(tenants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.auth.auth.LOOK_S", 0.0)
    write = tenants.write_text
    assert LOOK_S > 0
    async with visiting(tenants) as (client, _):
        assert (await client.get("/v1/models", headers=bearing(ACME))).status_code == 200
        write(TENANTS.replace(hash_of(ACME), hash_of(new_key())) + "\n")
        assert (await client.get("/v1/models", headers=bearing(ACME))).status_code == 401
        write("nonsense")
        assert (await client.get("/v1/models", headers=bearing(GLOBEX))).status_code == 200
        assert "baton_tenants_file_errors_total 1.0" in (await client.get("/metrics")).text
        degraded = (await client.get("/ready")).json()["degraded"]
        assert "the file of tenants was not loaded again, the old one stays in force: " in degraded
        write(TENANTS + "\n\n")
        assert (await client.get("/v1/models", headers=bearing(ACME))).status_code == 200
        assert "tenants" not in (await client.get("/ready")).json()["degraded"]


def _leave(path: Path, left: str | Path | None) -> None:
    """`left`: a text, where a link leads (nowhere for itself), or nothing."""
    if isinstance(left, str):
        path.write_text(left)
        return
    path.unlink()
    if left is not None:
        path.symlink_to(left)


@pytest.mark.parametrize(
    "left",
    [
        "",
        "[tenants]\n",
        TENANTS.partition("[tenants")[0],
        "a = " + "[" * 5000,
        None,
        Path("tenants.toml"),
        Path("/dev/zero"),
    ],
    ids=["empty", "no tenant", "administrators", "deep", "none", "loop", "device"],
)
async def test_a_file_without_tenants_opens_nothing(
    tenants: Path, monkeypatch: pytest.MonkeyPatch, left: str | Path | None
) -> None:
    monkeypatch.setattr("router.auth.auth.LOOK_S", 0.0)
    async with visiting(tenants) as (client, generate):
        _leave(tenants, left)
        degraded = (await client.get("/ready")).json()["degraded"]
        statuses = [(await client.post("/v1/completions", json=PROMPT)).status_code]
        statuses += [(await client.get(path)).status_code for path in ("/v1/models", "/admin/status")]
        statuses += [(await client.get("/v1/models", headers=bearing(ACME))).status_code]
    assert statuses == [401, 401, 401, 200]
    assert "tenants" in degraded
    assert not generate.jobs
    with pytest.raises(Misconfigured):
        AccessControl(tenants)


async def test_a_head_that_is_too_long_is_refused() -> None:
    async with visiting(None) as (client, _):
        response = await client.get("/v1/models", headers={"x-long": "x" * 70_000})
    assert response.status_code == 431
    assert response.json()["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"x-baton-max-ttft-ms": "250"}, {}, 0.25),
        ({}, {"max_ttft_ms": 500}, 0.5),
        ({"x-baton-max-ttft-ms": "250"}, {"max_ttft_ms": 500}, 0.5),
        ({}, {}, None),
    ],
)
async def test_a_bound_on_the_first_token_comes_in_body_or_header(
    headers: dict[str, str], body: dict[str, int], expected: float | None
) -> None:
    async with visiting(None) as (client, generate):
        assert (await client.post("/v1/completions", json=PROMPT | body, headers=headers)).status_code == 200
    assert generate.jobs[0].max_ttft_s == expected


@pytest.mark.parametrize("told", ["soon", "nan", "-1", "0"])
async def test_an_invalid_deadline_is_refused(told: str) -> None:
    async with visiting(None) as (client, _):
        response = await client.post("/v1/completions", json=PROMPT, headers={"x-baton-max-ttft-ms": told})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_ttft_ms"


async def test_grpc_asks_for_the_same_keys(tenants: Path) -> None:
    generate = Scripted(saying("hi"))
    face = GrpcFace(make_gateway(generate, access=AccessControl(tenants)), host="127.0.0.1", port=0)
    port = await face.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, asked = pb_grpc.InferenceStub(channel), pb.GenerateRequest(model="tiny", text="hello")
            for call in (
                stub.Complete(asked),
                stub.Tokenize(pb.TokenizeRequest(model="tiny", text="x")),
                stub.ListModels(pb.ListModelsRequest()),
                stub.Status(pb.StatusRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as forbidden:
                await stub.Status(pb.StatusRequest(), metadata=(("authorization", f"Bearer {ACME}"),))
            assert forbidden.value.code() is grpc.StatusCode.PERMISSION_DENIED
            done = await stub.Complete(asked, metadata=(("authorization", f"Bearer {ACME}"),))
    finally:
        await face.stop()
    assert done.choices[0].text == "hi"
    assert generate.jobs[0].tenant == "acme"
