"""Measures the least that a gateway needs: CPU time of a socket write, a gRPC message and a short HTTP request.

    python -m benchmarks.gateway.floor

The short request is an HTTP answer in two chunks under the gateway's server, and a gRPC message to a worker and one
back. Clients are in another process on the same machine, so that only the writer is measured: its system call, and the
receiver's side of the network, which Linux runs within it. Every round writes once to each of 256 connections and then
waits 20 ms, as steps of a worker do.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import resource
import selectors
import socket
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import grpc
import uvicorn
import uvloop

from benchmarks.gateway.router import StreamClient
from kvtransfer.native import load
from protos import worker_pb2
from router.http.protocol import HttpProtocol

CONNECTIONS, ROUNDS, PAUSE_S = 256, 150, 0.02
REQUESTS = 2000
EVENT = b"f0\r\ndata: " + b"x" * 230 + b"\n\n\r\n"
SEND = """
#include <sys/socket.h>
void send_all(const int *fds, int num, const char *bytes, int size) {
    for (int i = 0; i < num; i++) send(fds[i], bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
}
"""


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def drain(port: int, count: int) -> None:
    """Reads everything from this number of connections."""
    selector = selectors.DefaultSelector()
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(65536):
                return


async def connected() -> tuple[list[asyncio.Transport], BaseProcess]:
    transports = list[asyncio.Transport]()
    all_there = asyncio.Event()

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast("asyncio.Transport", transport))
            if len(transports) == CONNECTIONS:
                all_there.set()

    server = await asyncio.get_running_loop().create_server(Accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = multiprocessing.get_context("spawn").Process(target=drain, args=(port, CONNECTIONS), daemon=True)
    client.start()
    await all_there.wait()
    return transports, client


async def rounds(write_all: Callable[[], None]) -> float:
    """Microseconds of one write."""
    spent_s = 0.0
    for number in range(ROUNDS):
        before_s = cpu_s()
        write_all()
        await asyncio.sleep(0)
        if number >= ROUNDS // 5:
            spent_s += cpu_s() - before_s
        await asyncio.sleep(PAUSE_S)
    return spent_s / (ROUNDS - ROUNDS // 5) / CONNECTIONS * 1e6


async def writes() -> dict[str, float]:
    transports, client = await connected()
    sockets = [transport.get_extra_info("socket") for transport in transports]
    fds = (ctypes.c_int * CONNECTIONS)(*(one.fileno() for one in sockets))
    duplicates = [socket.socket(fileno=os.dup(fd)) for fd in fds]
    source = Path("/tmp") / f"send-{os.getpid()}.c"
    source.write_text(SEND)
    library = load(source)
    assert library is not None, "there is no compiler"

    def by_transport() -> None:
        for transport in transports:
            transport.write(EVENT)

    def by_socket() -> None:
        for one in duplicates:
            one.send(EVENT)

    found = {
        "compiled, a system call each": await rounds(lambda: library.send_all(fds, CONNECTIONS, EVENT, len(EVENT))),
        "Python's socket.send": await rounds(by_socket),
        "uvloop's transport.write": await rounds(by_transport),
    }
    client.kill()
    return found


class Steps(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, message: bytes) -> None:
        self._message = message

    def service(self, details: Any) -> Any:
        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            while True:
                yield self._message
                await asyncio.sleep(PAUSE_S)

        return grpc.unary_stream_rpc_method_handler(stream)


def steps(address: Any, message: bytes) -> None:
    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Steps(message),))
        address.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


async def messages() -> float:
    """Microseconds of a step's message of 256 tokens."""
    message = worker_pb2.StepMessage(numbers=range(1, 257), token_ids=range(300, 556)).SerializeToString()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=steps, args=(theirs, message), daemon=True)
    server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ours.recv()}") as channel:
        call = channel.unary_stream(
            "/a/b", request_serializer=None, response_deserializer=worker_pb2.StepMessage.FromString
        )(b"")
        for number in range(ROUNDS):
            await call.read()
            if number == ROUNDS // 5:
                before_s = cpu_s()
        spent_s = cpu_s() - before_s
    server.kill()
    return spent_s / (ROUNDS - ROUNDS // 5 - 1) * 1e6


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """As short as a stream can be."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def ask(port: int, done: Any) -> None:
    async def asking() -> None:
        await StreamClient(f"http://127.0.0.1:{port}").ask_all(REQUESTS, 1, at_once=16)

    uvloop.run(asking())
    done.send(None)


async def requests() -> float:
    """Microseconds of an answer over HTTP."""
    config = uvicorn.Config(answer, http=HttpProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.Server(config).server_state

    def protocol() -> HttpProtocol:
        return HttpProtocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    port = server.sockets[0].getsockname()[1]
    client = multiprocessing.get_context("spawn").Process(target=ask, args=(port, theirs), daemon=True)
    before_s = cpu_s()
    client.start()
    await asyncio.to_thread(ours.recv)
    spent_s = cpu_s() - before_s
    server.close()
    return spent_s / REQUESTS * 1e6


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, details: Any) -> Any:
        async def stream(request: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in request:
                yield message

        return grpc.stream_stream_rpc_method_handler(stream)


def echo(address: Any) -> None:
    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Echo(),))
        address.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


async def calls() -> float:
    """Microseconds of a message there and one back, one after another."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs,), daemon=True)
    server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ours.recv()}") as channel:
        open_stream: Any = channel.stream_stream("/a/b", request_serializer=None, response_deserializer=None)
        call = open_stream()
        for number in range(REQUESTS):
            if number == REQUESTS // 5:
                before_s = cpu_s()
            await call.write(b"x" * 300)
            await call.read()
        spent_s = cpu_s() - before_s
    server.kill()
    return spent_s / (REQUESTS - REQUESTS // 5) * 1e6


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, microseconds in uvloop.run(writes()).items():
        print(f"{name:32} {microseconds:8.2f} us a write")
    print(f"{'gRPC':32} {uvloop.run(messages()):8.1f} us a message of 256 tokens")
    print(f"{'HTTP':32} {uvloop.run(requests()):8.1f} us a request")
    print(f"{'gRPC, there and back':32} {uvloop.run(calls()):8.1f} us a request")
