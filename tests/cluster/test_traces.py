"""A gateway, a worker behind it, and a collector that takes the traces of requests."""

from __future__ import annotations

import asyncio
import base64
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.cli.serve import DEMO
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos import inference_pb2, inference_pb2_grpc
from protos.errors import Misconfigured
from protos.tls import FaceTls, PeerTls
from router.observe import exporter
from router.router_config import RouterConfig, TelemetryConfig
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}


class Collector:
    """Takes OTLP over HTTP, from `listen` on; `refusals` are statuses that it answers first. Its port is its own before
    that, and refuses connections."""

    def __init__(self) -> None:
        bodies: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        refusals = self.refusals = list[int]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                body = MessageToDict(ExportTraceServiceRequest.FromString(content))
                status = refusals.pop(0) if refusals else 200
                if status == 200:
                    bodies.put((f"{self.path} {self.headers.get('x-tenant')}", body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.send_header("retry-after", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._bodies = bodies
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def listen(self) -> None:
        self._server.server_activate()
        self._thread.start()

    async def spans(self, path: str = "/v1/traces None") -> list[dict[str, Any]]:
        where, body = await asyncio.to_thread(self._bodies.get, timeout=60)
        assert where == path
        [resource] = body["resourceSpans"]
        names = {
            attribute["key"]: attribute["value"]["stringValue"] for attribute in resource["resource"]["attributes"]
        }
        assert names["service.name"] == "baton"
        [scope] = resource["scopeSpans"]
        for span in scope["spans"]:
            for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[name] = base64.b64decode(span[name]).hex()
        return list(scope["spans"])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(autouse=True)
def traces_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "FLUSH_S", 0.1)
    monkeypatch.setattr(exporter, "CLOSE_S", 1.0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.listen()
    yield made
    made.close()


@asynccontextmanager
async def serving(telemetry: TelemetryConfig) -> AsyncIterator[GatewayServer]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = RouterConfig(model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0, telemetry=telemetry)
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    info = await worker.start("127.0.0.1", peers=PeerTls())
    front = GatewayServer([ModelSettings(config=config)], listening, tls=FaceTls(), peers=PeerTls())
    try:
        await front.start()
        front.fleet.add_worker(info.address, worker_id="w")
        await front.ready()
        yield front
    finally:
        await front.stop(0.0)
        await worker.stop()


async def ask(front: GatewayServer, **changes: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=front.url) as client:
        return await client.post("/v1/completions", json=ASKED, headers=changes)


def facts(span: dict[str, Any]) -> dict[str, Any]:
    return {attribute["key"]: next(iter(attribute["value"].values())) for attribute in span["attributes"]}


async def test_a_request_is_one_tree_below_its_callers_span(collector: Collector) -> None:
    collector.refusals.append(503)
    telemetry = TelemetryConfig(endpoint=collector.url, headers="x-tenant=acme")
    async with serving(telemetry) as front:
        answer = await ask(front, traceparent=f"00-{TRACE}-{CALLER}-01")
        spans = await collector.spans("/v1/traces acme")
    assert {span["traceId"] for span in spans} == {TRACE}
    root = spans[0]
    assert (root["parentSpanId"], root["name"]) == (CALLER, "text_completion demo")
    assert [span["name"] for span in spans[1:]] == ["receive", "queue", "route", "prefill", "decode"]
    for child in spans[1:]:
        assert child["parentSpanId"] == root["spanId"]
        assert int(root["startTimeUnixNano"]) <= int(child["startTimeUnixNano"]) <= int(child["endTimeUnixNano"])
        assert int(child["endTimeUnixNano"]) <= int(root["endTimeUnixNano"])
    attributes = facts(root)
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == ("3", "4")
    assert facts(spans[4])["baton.worker"] == "w"


async def test_callers_decide_whether_a_request_is_traced(collector: Collector) -> None:
    async with serving(TelemetryConfig(endpoint=f"{collector.url}/v1/traces", sample=0.0)) as front:
        await ask(front, traceparent=f"00-{TRACE}-{CALLER}-00")
        await ask(front)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model="demo", tokens=inference_pb2.TokenIds(ids=[1, 2, 3]))
            metadata = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
            async for _ in stub.Generate(request, metadata=metadata):
                pass
        spans = await collector.spans()
    assert [span["traceId"] for span in spans if span["name"] == "chat demo"] == [TRACE], "the third request alone"
    assert len({span["traceId"] for span in spans}) == 1


@pytest.fixture
def no_collector() -> TelemetryConfig:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return TelemetryConfig(endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}")


async def test_a_collector_that_is_away_costs_no_request(
    caplog: pytest.LogCaptureFixture, no_collector: TelemetryConfig
) -> None:
    async with serving(no_collector) as front:
        assert (await ask(front)).status_code == 200
    assert front.registry.get_sample_value("baton_traces_total", {"outcome": "failed"}) == 1.0
    assert collector_is_missed(caplog)


async def test_traces_beyond_the_queue_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, no_collector: TelemetryConfig
) -> None:
    """The first trace is tried, at most one waits."""
    monkeypatch.setattr(exporter, "MAX_QUEUED", 1)
    monkeypatch.setattr(exporter, "MAX_BATCH", 1)
    async with serving(no_collector) as front:
        assert [(await ask(front)).status_code for _ in range(4)] == [200] * 4
    dropped, failed = (
        front.registry.get_sample_value("baton_traces_total", {"outcome": outcome}) for outcome in ("dropped", "failed")
    )
    assert (dropped, failed) in ((2.0, 2.0), (3.0, 1.0))
    assert not [thread for thread in threading.enumerate() if "SpanRecord" in thread.name]


def collector_is_missed(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.name.startswith("opentelemetry.exporter") for record in caplog.records)


async def test_spans_missed_by_a_collector_are_sent_later(caplog: pytest.LogCaptureFixture) -> None:
    away = Collector()
    async with serving(TelemetryConfig(endpoint=away.url)) as front:
        await ask(front, traceparent=f"00-{TRACE}-{CALLER}-01")
        async with asyncio.timeout(60):
            while not collector_is_missed(caplog):  # noqa: ASYNC110 - a thread says it
                await asyncio.sleep(0.01)
        away.listen()
        try:
            spans = await away.spans()
        finally:
            away.close()
    assert {span["traceId"] for span in spans} == {TRACE}
    assert front.registry.get_sample_value("baton_traces_total", {"outcome": "sent"}) == 1.0


def test_an_invalid_endpoint_is_refused() -> None:
    with pytest.raises(Misconfigured, match="'collector:4318': give the URL of a collector"):
        TelemetryConfig(endpoint="collector:4318")
    with pytest.raises(Misconfigured, match="'authorization' without a value: write name=value"):
        TelemetryConfig(endpoint="http://c:4318", headers="authorization")


def test_a_gateway_without_traces_never_imports_the_sdk() -> None:
    program = "import sys, cluster.gateway.gateway_server; sys.exit('opentelemetry.sdk.trace' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
