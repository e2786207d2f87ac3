"""`baton batch FILE` against a gateway that runs batches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import typer

from cluster.cli.client import batch as verb
from protos.errors import Misconfigured
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
    assert "is completed: 1 answered, 1 not" in capsys.readouterr().out


async def test_what_is_wrong_is_shown_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
