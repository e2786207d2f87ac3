"""`baton batch FILE` against a gateway that runs batches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import typer

from cluster.cli.client import batch_verb as verb
from protos.errors import BatonError, Misconfigured
from tests.unit.router.batches.batching import batching, jsonl, line


async def test_a_file_is_run_and_its_answers_lie_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "PERIOD_S", 0.02)
    file = tmp_path / "requests.jsonl"
    bad = line("b")
    bad["body"]["temperature"] = 9
    file.write_bytes(jsonl([line("a"), bad]))
    async with batching(tmp_path / "store") as (client, _):
        with pytest.raises(typer.Exit) as ended:
            await asyncio.to_thread(verb.batch, file, url=str(client.base_url))
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(verb.batch, file, output=tmp_path / "own.jsonl", url=str(client.base_url))
    assert ended.value.exit_code == 1, "a request has failed"
    for name in ("requests.output.jsonl", "own.jsonl"):
        [answer] = (tmp_path / name).read_text().splitlines()
        assert json.loads(answer)["custom_id"] == "a"
    for name in ("requests.errors.jsonl", "own.errors.jsonl"):
        assert "temperature" in (tmp_path / name).read_text()
    told = capsys.readouterr()
    assert "is completed: 1 answered, 1 not" in told.out
    assert told.err.count("b: 'temperature' is 9") == 2, "each run prints why the line failed"


async def test_errors_are_shown_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(jsonl([line("a"), line("a")]))
    async with batching(tmp_path / "store") as (client, _):
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(verb.batch, file, url=str(client.base_url))
    told = capsys.readouterr()
    assert told.out.endswith(" has failed\n")
    assert "line 2: The custom_id 'a' is another request's" in told.err
    file.write_text("hello")
    with pytest.raises(Misconfigured, match="no request"):
        verb.batch(file)


async def test_answers_of_an_earlier_run_are_overwritten_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "PERIOD_S", 0.02)
    file, output = tmp_path / "r.jsonl", tmp_path / "r.output.jsonl"
    file.write_bytes(jsonl([line("a")]))
    output.write_text("kept")
    async with batching(tmp_path / "store") as (client, _):
        with pytest.raises(Misconfigured, match=r"r\.output\.jsonl is there.*--overwrite"):
            await asyncio.to_thread(verb.batch, file, url=str(client.base_url))
        assert not (await client.files.list()).data, "nothing was sent"
        assert output.read_text() == "kept"
        await asyncio.to_thread(verb.batch, file, url=str(client.base_url), overwrite=True)
    assert "custom_id" in output.read_text()


async def test_a_batch_that_was_left_is_followed_and_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "PERIOD_S", 0.02)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "requests.jsonl"
    file.write_bytes(jsonl([line("a")]))
    async with batching(tmp_path / "store") as (client, _):
        url = str(client.base_url)
        await asyncio.to_thread(verb.batch, file, detach=True, url=url)
        batch_id = capsys.readouterr().out.strip()
        await asyncio.to_thread(verb.batch, follow=batch_id, url=url)
        assert "custom_id" in (tmp_path / f"{batch_id}.output.jsonl").read_text()
        with pytest.raises(BatonError, match="No batch found with id 'no such'"):
            await asyncio.to_thread(verb.batch, follow="no such", url=url)
        capsys.readouterr()
    async with batching(tmp_path / "other", runs=False) as (client, _):
        url = str(client.base_url)
        await asyncio.to_thread(verb.batch, file, detach=True, url=url)
        batch_id = capsys.readouterr().out.strip()
        await asyncio.to_thread(verb.batch, cancel=batch_id, url=url)
        assert capsys.readouterr().out == f"{batch_id} is cancelling\n"
    with pytest.raises(Misconfigured, match="give the FILE of requests"):
        verb.batch()


async def test_a_batch_that_is_refused_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(jsonl([line("a") | {"url": "/v1/nothing"}]))
    async with batching(tmp_path / "store") as (client, _):
        url = str(client.base_url)
        with pytest.raises(Misconfigured, match="--window 5m: give 24h, or other hours from 1h to 168h"):
            await asyncio.to_thread(verb.batch, file, window="5m", url=url)
        with pytest.raises(BatonError, match="endpoint"):
            await asyncio.to_thread(verb.batch, file, url=url)
        assert (await client.files.list()).data == []
