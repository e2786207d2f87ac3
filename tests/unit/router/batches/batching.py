"""A gateway that keeps files and runs batches, over a scripted model, with a clock that tests move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
from prometheus_client import CollectorRegistry

from router.batches.batch_runner import BatchRunner
from router.batches.open_batches import open_runner
from router.files.batch_storage import BatchStorage, open_storage
from router.gateway import Gateway
from router.router_config import BatchConfig
from router.traces.request_trace import RequestTraces
from tests.unit.router.scripted import Script, Scripted, make_gateway, saying, serving

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


class TestClock:
    __test__ = False

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001  # no two events at once: lists are in the order of time
        return self.now_s


class Batching:
    """Any number of gateway processes on one folder, as tests begin and kill them."""

    def __init__(
        self,
        folder: Path,
        script: Script | None = None,
        *,
        max_lines: int = 1000,
        database_url: str = "",
        bucket: str | None = None,
        max_tenant_bytes: int = 1 << 30,
        **changes: Any,
    ) -> None:
        """With `database_url` nothing is in the folder. `bucket`: an s3:// URL, for contents."""
        self.clock = TestClock()
        self.generate = Scripted(script or saying("hi"))
        self.folder = bucket if database_url else folder
        self._max_lines, self._database_url, self._changes = max_lines, database_url, changes
        self._max_tenant_bytes = max_tenant_bytes
        self.storage = self.opened()
        self._tasks: list[asyncio.Task[None]] = []

    def opened(self) -> BatchStorage:
        return open_storage(
            self.folder, max_file_bytes=1 << 20, max_lines=self._max_lines, database_url=self._database_url,
            clock=self.clock, max_tenant_bytes=self._max_tenant_bytes,
        )  # fmt: skip

    def gateway(self, storage: BatchStorage | None = None) -> Gateway:
        return make_gateway(self.generate, batches=storage or self.storage, **self._changes)

    def runner(self, *, max_running: int = 8, storage: BatchStorage | None = None) -> BatchRunner:
        config = BatchConfig(max_running=max_running, lease_s=30.0)
        storage = storage or self.storage
        gateway = self.gateway(storage)
        return open_runner(
            config, gateway, storage, generate=self.generate, records=RequestTraces(), registry=CollectorRegistry()
        )

    def run(self, **settings: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(self.runner(**settings).run())
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.storage.close()


@asynccontextmanager
async def batching(
    folder: Path, script: Script | None = None, *, runs: bool = True, **changes: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Batching]]:
    made = Batching(folder, script, **changes)
    async with (
        serving(made.gateway()) as url,
        openai.DefaultAsyncHttpxClient(verify=False) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        if runs:
            made.run()
        try:
            yield client, made
        finally:
            await made.close()


def line(custom_id: str, *, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"hello {custom_id}"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changes


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


async def upload(client: openai.AsyncOpenAI, lines: Iterable[Any]) -> str:
    return (await client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch")).id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """Polls as a client does."""
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.01)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(item) for item in text.splitlines()]
