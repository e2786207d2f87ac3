"""Files and batches as stores: what several processes, or hosts, that share them may rely on. SQLite and Postgres."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from protos.errors import InvalidRequest, Misconfigured, NotFound, Unavailable
from router.database.database import RejectedValue
from router.database.postgres import PostgresDatabase
from router.database.sqlite import SqliteDatabase
from router.files.batch_storage import BatchStorage, open_storage, prepare
from router.files.batches import LeaseLost
from router.files.contents import ABANDONED_S, PART_BYTES, DatabaseContents, FileContents, FolderContents
from router.files.records import LineResult, PageAsked, StoredBatch, StoredFile
from router.files.s3_contents import S3Contents
from router.router_config import BatchConfig, RouterConfig
from tests.unit.router.batches.batching import CHAT, TestClock, batching, ended, line, results, upload

FILE = StoredFile(id="file-a", tenant="acme", filename="a.jsonl", purpose="batch", bytes=3, created_s=10.0)
BATCH = StoredBatch(
    id="batch_a", tenant="acme", key_id="k", api="openai", endpoint=CHAT, model="demo", input_file_id=FILE.id,
    window_text="24h", created_s=10.0, expires_s=1e12, metadata={"a": "1"},
)  # fmt: skip


class Hosts:
    """Opens the shared store as each of several gateways does."""

    def __init__(self, folder: Path, database_url: str, opened: ExitStack) -> None:
        self.clock = TestClock()
        self._folder, self._url, self._opened = folder, database_url, opened

    def one(self) -> BatchStorage:
        storage = open_storage(
            None if self._url else self._folder, max_file_bytes=1 << 20, max_lines=100, database_url=self._url,
            clock=self.clock,
        )  # fmt: skip
        self._opened.callback(storage.close)
        return storage


@pytest.fixture
def hosts(tmp_path: Path, database_url: str) -> Iterator[Hosts]:
    with ExitStack() as opened:
        yield Hosts(tmp_path, database_url, opened)


def results_of(storage: BatchStorage, batch: StoredBatch) -> list[bytes]:
    return b"".join(storage.batches.results(batch, is_error=False)).splitlines()


def test_a_batch_has_one_owner_and_a_line_one_result(hosts: Hosts) -> None:
    first, second = hosts.one(), hosts.one()
    first.batches.add(BATCH)
    owned = first.batches.claim("demo", 10.0)
    assert owned is not None
    assert owned.metadata == {"a": "1"}
    assert second.batches.claim("demo", 10.0) is None
    owned = first.batches.validated(owned, 3)
    first.batches.record(owned, [LineResult(line=1, content=b"b\n", output_tokens=2)])
    hosts.clock.now_s += 11.0
    taken = second.batches.claim("demo", 10.0)
    assert taken is not None
    with pytest.raises(LeaseLost):
        first.batches.record(owned, [LineResult(line=0, content=b"late\n")])
    assert list(second.batches.done(taken)) == [0, 1, 0]
    second.batches.record(taken, [LineResult(line=n, content=b"%d\n" % n, output_tokens=3) for n in (0, 1, 2)])
    assert results_of(second, taken) == [b"0", b"b", b"2"]
    state = second.batches.renew(taken, 10.0)
    assert (state.completed, state.output_tokens) == (3, 8)
    finished = second.batches.finish(second.batches.finalize(taken, "completed"), FILE, None)
    assert (finished.status, finished.output_file_id) == ("completed", FILE.id)
    assert first.files.find("acme", FILE.id) == FILE
    assert first.batches.find("acme", BATCH.id, "openai") == finished


def test_of_many_that_claim_at_once_one_owns_the_batch(hosts: Hosts) -> None:
    stores = [hosts.one() for _ in range(6)]
    stores[0].batches.add(BATCH)
    claims, begin = list[StoredBatch | None](), threading.Barrier(len(stores))

    def claim(storage: BatchStorage) -> None:
        begin.wait()
        claims.append(storage.batches.claim("demo", 1000.0))

    threads = [threading.Thread(target=claim, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([batch for batch in claims if batch is not None]) == 1


def test_an_error_takes_a_transaction_back(hosts: Hosts) -> None:
    storage = hosts.one()

    def change(*ids: str | None) -> None:
        with storage.database.writing() as transaction:
            for upload_id in ids:
                if upload_id is None:
                    raise KeyError
                transaction.run("INSERT INTO uploads VALUES (?, ?, ?, ?)", upload_id, "f", 1, 1.0)

    with pytest.raises(KeyError):
        change("a", None)
    with pytest.raises(RejectedValue, match="cannot hold"):
        change("a", "b", "a")
    with storage.database.reading() as transaction:
        assert transaction.run("SELECT * FROM uploads") == []


def test_pages_have_a_cursor(hosts: Hosts) -> None:
    storage = hosts.one()
    for number in range(5):
        storage.files.add(replace(FILE, id=f"file-{number}", created_s=10.0 + number // 2))
    storage.files.add(replace(FILE, id="file-other", tenant="other"))
    asked = PageAsked(limit=2, filters={"is_hidden": 0})
    page, has_more = storage.files.page("acme", asked)
    assert ([entry.id for entry in page], has_more) == (["file-4", "file-3"], True)
    page, has_more = storage.files.page("acme", replace(asked, after="file-2", limit=9))
    assert ([entry.id for entry in page], has_more) == (["file-1", "file-0"], False)
    with pytest.raises(InvalidRequest, match="file-other"):
        storage.files.page("acme", replace(asked, after="file-other"))


def test_a_file_that_expired_is_swept_with_its_content(hosts: Hosts) -> None:
    storage = hosts.one()
    for name, expires_s in (("short", hosts.clock() + 5), ("long", None)):
        storage.files.contents.store(name, BytesIO(b"abc"))
        storage.files.add(replace(FILE, id=name, expires_s=expires_s))
    hosts.clock.now_s += 10.0
    storage.files.sweep()
    with pytest.raises(NotFound):
        storage.files.contents.read("short", 0, 3)
    assert storage.files.contents.read("long", 0, 3) == b"abc"


async def test_a_batch_runs_in_two_processes_as_clients_see_it(tmp_path: Path, database_url: str) -> None:
    async with batching(tmp_path, runs=False, database_url=database_url) as (client, made):
        other = made.opened()
        file_id = await upload(client, [line(f"r{number}") for number in range(20)])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        made.run(max_running=2)
        made.run(storage=other)
        done = await asyncio.wait_for(ended(client, batch.id), 60)
        answers = await results(client, done.output_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{number}" for number in range(20))
        await client.files.delete(file_id)
        await made.close()
        other.close()


# -- what is in files --------------------------------------------------------------------------------------------------


class LaterSqlite(SqliteDatabase):
    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class LaterPostgres(PostgresDatabase):
    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


def opened_database(folder: Path, url: str) -> LaterSqlite | LaterPostgres:
    if url:
        return LaterPostgres(url, "batches", prepare)
    return LaterSqlite(folder / "batches.db", prepare, setting="router.batch.folder", place="folder")


@pytest.fixture(params=["folder", "sqlite", "postgres", "s3"])
def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileContents]:
    if request.param == "folder":
        yield FolderContents(tmp_path / "files")
    elif request.param == "s3":
        yield S3Contents(request.getfixturevalue("s3"))
    else:
        url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
        with closing(opened_database(tmp_path, url)) as database:
            yield DatabaseContents(database)


class FailingContent(BytesIO):
    """A content whose end cannot be read."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() == len(self.getbuffer()):
            raise Unavailable("gone")
        return data


def test_a_content_is_read_from_anywhere(contents: FileContents) -> None:
    data = bytes(range(256)) * 3000
    contents.store("a", BytesIO(data))
    for start, size in (
        (0, 1), (0, len(data)), (PART_BYTES - 1, 2), (PART_BYTES, 10), (600_000, 10**6), (len(data), 5), (10**9, 5)
    ):  # fmt: skip
        assert contents.read("a", start, size) == data[start : start + size]
    contents.store("a", BytesIO(b"new"))
    assert contents.read("a", 0, 9) == b"new"
    contents.store("empty", BytesIO())
    assert contents.read("empty", 0, 9) == b""
    contents.delete("a")
    contents.delete("a")
    with pytest.raises(NotFound, match="has been deleted"):
        contents.read("a", 0, 1)


def test_a_copy_that_fails_leaves_the_file_as_it_was(contents: FileContents) -> None:
    contents.store("a", BytesIO(b"old"))
    for file_id in ("a", "b"):
        with pytest.raises(Unavailable):
            contents.store(file_id, FailingContent(b"x" * 600_000))
    assert contents.read("a", 0, 9) == b"old"
    with pytest.raises(NotFound):
        contents.read("b", 0, 1)


def test_a_sweep_removes_abandoned_rows(tmp_path: Path, database_url: str) -> None:
    database = opened_database(tmp_path, database_url)
    contents = DatabaseContents(database)
    for file_id in ("known", "unknown"):
        contents.store(file_id, BytesIO(b"abc"))
    with database.writing() as transaction:  # as a process that was killed leaves it
        transaction.run("INSERT INTO uploads VALUES (?, ?, NULL, ?)", "lost", "lost", database.now_s())
        transaction.run("INSERT INTO upload_parts VALUES (?, ?, ?)", "lost", 0, b"x")
    contents.sweep(lambda _: False)
    assert contents.read("unknown", 0, 3) == b"abc", "its row may come yet"
    database.ahead_s = ABANDONED_S + 1
    contents.sweep(lambda name: name == "known")
    assert contents.read("known", 0, 3) == b"abc"
    with database.reading() as transaction:
        for table in ("uploads", "upload_parts"):
            assert transaction.run(f"SELECT count(*) AS left_over FROM {table}") == [{"left_over": 1}]
    database.close()


# -- S3 alone ----------------------------------------------------------------------------------------------------------


def test_a_large_file_goes_to_a_bucket_in_parts(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    client, contents = boto3.session.Session().client("s3"), S3Contents(s3)
    part = b"0123456789abcdef" * 2**16  # 1 MiB
    large, killed, unknown = (f"file-{number:024x}" for number in range(3))
    contents.store(large, BytesIO(part * 20))
    assert contents.read(large, (8 << 20) - 2, 4) == b"ef01"
    assert contents.read(large, (20 << 20) - 3, 100) == b"def"
    with pytest.raises(Unavailable):
        contents.store(large, FailingContent(part * 20))
    client.create_multipart_upload(Bucket="files", Key=f"of/baton/{killed}")  # as a process that was killed leaves it
    contents.store(unknown, BytesIO(b"a"))
    contents.sweep(lambda _: False)
    assert contents.read(unknown, 0, 1) == b"a", "its row may come yet"
    now = time.time()
    monkeypatch.setattr("router.files.s3_contents.time.time", lambda: now + ABANDONED_S + 1)
    contents.sweep(lambda name: name == large)
    with pytest.raises(NotFound):
        contents.read(unknown, 0, 1)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="files")
    assert [content["Key"] for content in client.list_objects_v2(Bucket="files")["Contents"]] == [f"of/baton/{large}"]


def test_a_sweep_keeps_foreign_objects_in_the_bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was below the prefix for a day, and no file of Baton's, was deleted."""
    import boto3

    client, contents = boto3.session.Session().client("s3"), S3Contents(s3)
    keys = ["of/baton/customers/backup.tar", "of/baton/file-mine", "of/baton/model.safetensors", "of/others"]
    for key in keys:
        client.put_object(Bucket="files", Key=key, Body=b"a")
    upload = client.create_multipart_upload(Bucket="files", Key="of/baton/of-others")["UploadId"]
    now = time.time()
    monkeypatch.setattr("router.files.s3_contents.time.time", lambda: now + ABANDONED_S + 1)
    contents.sweep(lambda _: False)
    assert [content["Key"] for content in client.list_objects_v2(Bucket="files")["Contents"]] == keys
    assert [listed["UploadId"] for listed in client.list_multipart_uploads(Bucket="files")["Uploads"]] == [upload]


def test_a_bucket_that_cannot_be_used_is_refused_by_name(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = S3Contents(s3)
    with pytest.raises(Misconfigured, match=r"router\.batch\.folder: s3://other/baton: .*give a bucket that exists"):
        S3Contents("s3://other/baton")
    with pytest.raises(Misconfigured, match="has no prefix: give s3://BUCKET/PREFIX"):
        S3Contents("s3://files")
    with pytest.raises(Misconfigured, match="has no bucket"):
        S3Contents("s3:///prefix")
    import boto3

    client = boto3.session.Session().client("s3")
    client.delete_bucket(Bucket="files")
    with pytest.raises(Unavailable, match=r"files cannot be read or written now: .*NoSuchBucket"):
        contents.read("a", 0, 1)
    with pytest.raises(Unavailable):
        contents.store("a", BytesIO(b"x"))


async def test_a_batch_runs_with_its_files_in_a_bucket(s3: str, postgres_url: str, tmp_path: Path) -> None:
    async with batching(tmp_path, database_url=postgres_url, bucket=s3) as (client, _):
        file_id = await upload(client, [line("a")])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        done = await asyncio.wait_for(ended(client, batch.id), 60)
        assert [result["custom_id"] for result in await results(client, done.output_file_id)] == ["a"]


def test_a_bucket_needs_a_database_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match=r"'s3://files' without router\.database"):
        RouterConfig(model_path=Path("m"), model_name="m", batch=BatchConfig(folder="s3://files"))
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(Misconfigured, match=r"pip install -e '\.\[s3\]'"):
        S3Contents("s3://files")
