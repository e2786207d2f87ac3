"""A gateway and a worker that know each other by certificates, and clients that see the gateway's."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from cluster.cli.admin_client import find_model, open_client
from cluster.cli.serve import DEMO
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos import inference_pb2, inference_pb2_grpc
from protos.errors import Misconfigured, Unavailable, WorkerLost
from protos.tls import WORKER_NAME, FaceTls, PeerTls, expiry_s
from router.fleet.channels import Channels
from router.fleet.worker_client import WorkerClient
from router.router_config import RouterConfig
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

EXPIRY = "baton_certificate_expiry_timestamp_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """`stranger` is a peer whose certificate another authority has signed."""

    ca: Path
    face: FaceTls
    peers: PeerTls
    stranger: PeerTls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")

    def write(name: str, blob: trustme.Blob) -> str:
        blob.write_to_path(folder / name)
        return str(folder / name)

    def peer(name: str, authority: trustme.CA, trusted: str) -> PeerTls:
        made = authority.issue_cert(WORKER_NAME)
        cert = write(f"{name}.pem", made.cert_chain_pems[0])
        return PeerTls(ca=trusted, cert=cert, key=write(f"{name}.key", made.private_key_pem))

    authority, other = trustme.CA(), trustme.CA()
    ca = write("ca.pem", authority.cert_pem)
    shown = authority.issue_cert("127.0.0.1", "localhost")
    face = FaceTls(cert=write("face.pem", shown.cert_chain_pems[0]), key=write("face.key", shown.private_key_pem))
    return Files(ca=Path(ca), face=face, peers=peer("peer", authority, ca), stranger=peer("stranger", other, ca))


@asynccontextmanager
async def toy(peers: PeerTls) -> AsyncIterator[str]:
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    info = await worker.start("127.0.0.1", peers=peers)
    try:
        yield info.address
    finally:
        await worker.stop()


async def described(address: str, peers: PeerTls) -> str:
    client = WorkerClient(address, connect_timeout_s=5.0, control_timeout_s=5.0, open_channel=Channels(peers))
    try:
        return (await client.describe()).worker_id
    finally:
        await client.close()


async def test_a_worker_accepts_certificates_of_its_authority_only(files: Files) -> None:
    async with toy(files.peers) as address:
        assert await described(address, files.peers) == "w"
        for nobody in (files.stranger, PeerTls()):
            with pytest.raises(WorkerLost, match=r"it closed the connection: with \[peers\]"):
                await described(address, nobody)


async def test_a_gateway_does_not_talk_to_a_worker_it_cannot_know(files: Files) -> None:
    elsewhere = replace(files.peers, cert=files.face.cert, key=files.face.key)
    for impostor, why in {
        files.stranger: r"not of the authority in peers\.ca", PeerTls(): "does not speak TLS",
        elsewhere: "not for the name baton-worker",
    }.items():  # fmt: skip
        async with toy(impostor) as address:
            with pytest.raises(WorkerLost, match=why):
                await described(address, files.peers)


async def test_clients_are_served_over_tls_by_a_worker_behind_it(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    config = RouterConfig(model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0)
    async with toy(files.peers) as address:
        front = GatewayServer([ModelSettings(config=config)], listening, tls=files.face, peers=files.peers)
        await front.start()
        try:
            front.fleet.add_worker(address, worker_id="w")
            await front.ready()
            assert front.url.startswith("https://")
            asked = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            async with httpx.AsyncClient(
                base_url=front.url, verify=ssl.create_default_context(cafile=files.ca)
            ) as client:
                answer = await client.post("/v1/completions", json=asked)
            assert answer.json()["usage"]["completion_tokens"] == 4
            trusted = grpc.ssl_channel_credentials(files.ca.read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{front.grpc_port}", trusted) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                models = await stub.ListModels(inference_pb2.ListModelsRequest())
            assert [model.id for model in models.models] == ["demo"]
            ends = {use: front.registry.get_sample_value(EXPIRY, {"use": use}) for use in ("clients", "peers")}
            assert ends == {"clients": expiry_s(files.face.cert), "peers": expiry_s(files.peers.cert)}
            assert expiry_s(files.face.cert) > time.time()
            with pytest.raises(Unavailable, match="SSL_CERT_FILE"):
                await asyncio.to_thread(served_by, front.url)
            monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
            assert await asyncio.to_thread(served_by, front.url) == "demo"
            with pytest.raises(Unavailable, match="where it speaks TLS, write --url https"):
                await asyncio.to_thread(served_by, front.url.replace("https", "http"))
        finally:
            await front.stop(0.0)


def served_by(url: str) -> str:
    with open_client(url) as client:
        return find_model(client).name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cert": "x.pem"}, "key is missing"),
        ({"key": "x.key"}, "cert is missing"),
    ],
)
def test_half_a_certificate_is_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(Misconfigured, match=f"tls: {told}"):
        FaceTls(**given)
    with pytest.raises(Misconfigured, match="peers: "):
        PeerTls(**given)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    with pytest.raises(Misconfigured, match=r"wrong\.pem: No such file"):
        FaceTls(cert=str(wrong), key=str(wrong)).check()
    wrong.write_text("nothing")
    with pytest.raises(Misconfigured, match="are not a certificate and its key"):
        FaceTls(cert=str(wrong), key=str(wrong)).check()
    with pytest.raises(Misconfigured, match=r"peers: .* are not a certificate and its key"):
        PeerTls(ca=str(tmp_path / "ca"), cert=str(wrong), key=str(wrong)).check()
    with pytest.raises(Misconfigured, match=r"peers\.ca"):
        Channels(PeerTls(ca=str(tmp_path / "ca"), cert=str(wrong), key=str(wrong)))


@pytest.mark.timeout(30)
def test_an_encrypted_key_is_refused_without_a_prompt(files: Files, tmp_path: Path) -> None:
    key = load_pem_private_key(Path(files.face.key).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a word")),
    )
    with pytest.raises(Misconfigured, match="without a password"):
        FaceTls(cert=files.face.cert, key=str(locked)).check()
