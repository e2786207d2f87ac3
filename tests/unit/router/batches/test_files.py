"""Files: upload as it streams, lists with a cursor, deletion, and whose they are."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protos.errors import Unavailable
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.files.contents import FolderContents
from tests.unit.router.batches.batching import CHAT, batching, ended, jsonl, line, upload
from tests.unit.router.scripted import talking


async def test_a_file_is_stored_listed_read_and_deleted(tmp_path: Path) -> None:
    async with batching(tmp_path, runs=False) as (client, _):
        contents = [bytes([number]) * (300_000 * number) for number in range(4)]
        made = [await client.files.create(file=(f"{len(item)}", item), purpose="batch") for item in contents]
        assert [item.bytes for item in made] == [len(content) for content in contents]
        assert await (await client.files.content(made[3].id)).aread() == contents[3]
        assert [entry.id async for entry in client.files.list(limit=1)] == [entry.id for entry in reversed(made)]
        first = await client.files.list(limit=3, order="asc")
        assert ([row.id for row in first.data], first.has_more) == ([entry.id for entry in made[:3]], True)
        rest = await client.files.list(order="asc", after=made[2].id)
        assert ([row.id for row in rest.data], rest.has_more) == ([made[3].id], False)
        assert (await client.files.delete(made[3].id)).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="No such file"):
                await gone(made[3].id)
        with pytest.raises(openai.NotFoundError, match="No such file") as refused:
            await client.batches.create(input_file_id=made[3].id, endpoint="/v1/completions", completion_window="24h")
        assert refused.value.param == "input_file_id"
        assert not [
            path for path in (tmp_path / "files").iterdir() if path.name not in {entry.id for entry in made[:3]}
        ]


async def test_a_file_expires(tmp_path: Path) -> None:
    async with batching(tmp_path, runs=False) as (client, made):
        after: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("f", b"x"), purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + 3600
        made.clock.now_s += 3601
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        made.storage.files.sweep()
        assert not list((tmp_path / "files").iterdir())


async def test_expired_files_take_no_place_on_a_page(tmp_path: Path) -> None:
    """A page of expired files alone was empty, and had more: clients stopped there."""
    async with batching(tmp_path, runs=False) as (client, made):
        file = await client.files.create(file=("kept", b"x"), purpose="batch")
        after: Any = {"anchor": "created_at", "seconds": 3600}
        for number in range(3):
            await client.files.create(file=(str(number), b"x"), purpose="batch", expires_after=after)
        made.clock.now_s += 4000
        assert [entry.id async for entry in client.files.list(limit=2)] == [file.id]


async def test_a_sweep_passes_over_files_that_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = FolderContents(tmp_path)
    for name in ("a.part", "b"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(
        Path, "iterdir", lambda folder: iter([folder / "renamed.part", folder / "a.part", folder / "b"])
    )
    contents.sweep(lambda name: name == "b")
    assert os.listdir(tmp_path) == ["b"]


async def test_a_folder_that_cannot_be_swept_is_a_typed_error(tmp_path: Path) -> None:
    contents = FolderContents(tmp_path / "files")
    (tmp_path / "files").rmdir()
    with pytest.raises(Unavailable, match="cannot be swept"):
        contents.sweep(lambda _: True)


async def test_the_input_of_a_running_batch_stays(tmp_path: Path) -> None:
    async with batching(tmp_path, runs=False) as (client, made):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="1h")  # type: ignore[arg-type]
        assert batch.expires_at == batch.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            await client.files.delete(file_id)
        made.run()
        await ended(client, batch.id)
        await client.files.delete(file_id)


@pytest.mark.parametrize(
    ("fields", "file", "problem"),
    [
        ({"purpose": "batch"}, None, "file"),
        ({}, b"x", "purpose"),
        ({"purpose": "fine-tune"}, b"x", "it must be batch"),
        ({"purpose": "batch", "expires_after[seconds]": "9"}, b"x", "between 3600"),
        ({"purpose": "batch", "model": "tiny"}, b"x", "Unknown parameter: 'model'"),
        ({"purpose": "batch"}, b"x" * (1 << 20) + b"y", "at most 1048576 bytes"),
    ],
)
async def test_a_wrong_upload_is_refused_by_name(
    tmp_path: Path, fields: dict[str, str], file: bytes | None, problem: str
) -> None:
    async with batching(tmp_path, runs=False) as (client, _):
        url = str(client.base_url).removesuffix("/v1/")
        async with httpx.AsyncClient(base_url=url) as http:
            parts: list[Any] = [(name, (None, value)) for name, value in fields.items()]
            reply = await http.post("/v1/files", files=parts + ([("file", ("f", file))] if file is not None else []))
            assert reply.status_code in (400, 413)
            assert problem in reply.json()["error"]["message"]
            plain = await http.post("/v1/files", json={"purpose": "batch"})
            assert "multipart/form-data" in plain.json()["error"]["message"]
        assert not list((tmp_path / "files").iterdir())


async def test_tenants_have_their_own(tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in ("acme", "other", "admin")}
    roster = tmp_path / "tenants.toml"
    tables = [f'[tenants.{name}]\nkeys = ["{hash_of(keys[name])}"]' for name in ("acme", "other")]
    roster.write_text("\n".join([f'admin_keys = ["{hash_of(keys["admin"])}"]', *tables]))
    async with batching(tmp_path / "batches", access=AccessControl(roster)) as (client, made):
        acme, other = client.with_options(api_key=keys["acme"]), client.with_options(api_key=keys["other"])
        file_id = await upload(acme, [line("a")])
        batch = await acme.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert (await ended(acme, batch.id)).status == "completed"
        assert {job.tenant for job in made.generate.jobs} == {"acme"}
        assert [entry.id async for entry in acme.batches.list()] == [batch.id]
        assert not [entry async for entry in other.batches.list()]
        assert not [entry async for entry in other.files.list()]
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="No batch found"):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError, match="No such file"):
            await other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


async def test_without_a_folder_the_setting_is_named() -> None:
    async with talking() as (client, _):
        with pytest.raises(openai.NotFoundError, match=r"router\.batch\.folder"):
            await client.files.create(file=("f", b""), purpose="batch")


async def posted(tmp_path: Path, body: bytes, *, size: int = 10_000) -> httpx.Response:
    """The answer to a form that is sent in chunks of `size` bytes."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async with batching(tmp_path, runs=False) as (client, _), httpx.AsyncClient(base_url=str(client.base_url)) as http:
        kind = {"content-type": "multipart/form-data; boundary=boundary"}
        reply = await http.post("files", content=chunks(), headers=kind)
        if reply.is_success:
            stored = await client.files.content(reply.json()["id"])
            reply.extensions["stored"] = await stored.aread()
        return reply


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
async def test_a_form_may_be_cut_anywhere(tmp_path: Path, size: int) -> None:
    content = jsonl([line("a")]) + b"\r\n--bound not quite\r\n--boundar"
    body = (
        b'--boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--boundary\r\ncontent-disposition: form-data; name=file; filename="a \\"b\\".jsonl"\r\n'
        b"Content-Type: application/json\r\n\r\n" + content + b"\r\n--boundary--\r\nepilogue"
    )
    reply = await posted(tmp_path, body, size=size)
    assert (reply.status_code, reply.json()["filename"]) == (200, 'a "b".jsonl')
    assert (reply.json()["bytes"], reply.extensions["stored"]) == (len(content), content)


def _field(name: str, value: bytes = b"batch") -> bytes:
    return b'--boundary\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)


_FILE, _END = _field('file"; filename="f'), b"--boundary--"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(b"--boundary\r\nx: y\r\n\r\n", None, id="name"),
        pytest.param(b"--boundaryx\r\n", None, id="line end"),
        pytest.param(b"--boundary\r\n" + b"x" * 9000, None, id="long header"),
        pytest.param(b"--boundary\r\n" + b"x: y\r\n" * 9, None, id="headers"),
        pytest.param(_field("purpose") + _field("file"), "file", id="cut"),
        pytest.param(_FILE + _field("purpose") * 2 + _END, "purpose", id="field twice"),
        pytest.param(_FILE * 2 + _END, "file", id="file twice"),
        pytest.param(_field("file") + _field("purpose") + _END, "file", id="text"),
        pytest.param(_FILE + _field("purpose", b"x" * 1025) + _END, "purpose", id="long field"),
        pytest.param(_FILE + _field("purpose") + _field("other") * 99 + _END, None, id="many fields"),
    ],
)
async def test_a_bad_form_is_refused_and_leaves_no_file(tmp_path: Path, body: bytes, param: str | None) -> None:
    reply = await posted(tmp_path, body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert reply.json()["error"]["param"] == param
    assert not list((tmp_path / "files").iterdir())
