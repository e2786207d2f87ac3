"""`baton batch FILE`: hands a file of requests in, shows how far it is, and writes the answers beside it.

upload ─▶ create ─▶ poll ─▶ FILE.output.jsonl, FILE.errors.jsonl          Ctrl-C leaves it running: --follow, --cancel
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cluster.cli.admin_client import DEFAULT_URL, GatewayUrl, no_answer, open_client, raise_for_error, request_json
from protos.errors import BatonError, Misconfigured
from protos.hints import unusable
from router.files.records import ENDED, WINDOW, WINDOWS

PERIOD_S = 1.0
MAX_REASONS = 5
UPLOAD_TIMEOUT_S = 600.0
Batch = Mapping[str, Any]

ApiKey = Annotated[str, typer.Option("--api-key", envvar="BATON_API_KEY", help="A tenant's key, where one is needed.")]


def batch(
    file: Annotated[
        Path | None, typer.Argument(help="JSON lines of requests: custom_id, method, url, body (docs/api.md).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File of the answers, errors beside it; default: beside FILE."),
    ] = None,
    window: Annotated[str, typer.Option(help="Hours until it expires, from 1h to 168h.")] = "24h",
    detach: Annotated[bool, typer.Option("--detach", help="Print the batch's id, and do not wait.")] = False,
    follow: Annotated[str, typer.Option(help="Id of a batch: wait for its end, and write its answers.")] = "",
    cancel: Annotated[str, typer.Option(help="Id of a batch to cancel. What is answered by then is kept.")] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace answers and errors of an earlier run.")
    ] = False,
    url: GatewayUrl = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Run a file of requests when the workers have room, and write their answers beside it."""
    if cancel:
        with open_client(url, api_key) as client:
            found = request_json(client, f"/v1/batches/{quote(cancel, safe='')}/cancel", "POST")
        typer.echo(f"{cancel} is {found['status']}")
        return
    if file is None and not follow:
        raise Misconfigured("give the FILE of requests, or a batch's id with --follow or --cancel", param="file")
    beside = file or Path(f"{follow}.jsonl")
    errors = (output or beside).with_suffix(".errors.jsonl")
    output = output or beside.with_suffix(".output.jsonl")
    if not detach and not overwrite:
        _check_free(output, errors)
    with open_client(url, api_key) as client:
        batch_id = follow or _hand_in(client, beside, window)
        if detach:
            typer.echo(batch_id)
            return
        try:
            ended = _follow(client, batch_id)
        except KeyboardInterrupt:
            typer.echo(
                f"\n{batch_id} goes on: `baton batch --follow {batch_id}` waits for it, --cancel {batch_id} ends it",
                err=True,
            )
            raise typer.Exit(130) from None
        _save(client, ended, output, errors)
        if ended["status"] != "completed" or ended["request_counts"]["failed"]:
            raise typer.Exit(1)


def _hand_in(client: httpx.Client, file: Path, window: str) -> str:
    """Returns the new batch's id. A file whose batch is refused is deleted."""
    if not WINDOW.fullmatch(window):
        raise Misconfigured(f"--window {window}: give {WINDOWS}", param="window")
    asked = {"endpoint": _endpoint(file), "completion_window": window}
    file_id = _upload(client, file)
    try:
        return str(request_json(client, "/v1/batches", "POST", asked | {"input_file_id": file_id})["id"])
    except BatonError:
        with suppress(BatonError):
            request_json(client, f"/v1/files/{file_id}", "DELETE")
        raise


def _endpoint(file: Path) -> str:
    """The `url` of the first line. Raises Misconfigured for a file that cannot be one of requests."""
    try:
        with file.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        return str(json.loads(first)["url"])
    except OSError as error:
        raise Misconfigured(f"{file}: {unusable(error)}", param="file") from error
    except (ValueError, LookupError, TypeError):
        raise Misconfigured(
            f'{file}: its first line is no request: give {{"custom_id": "1", "method": "POST", "url": '
            '"/v1/chat/completions", "body": {...}} on each line',
            param="file",
        ) from None


def _check_free(*files: Path) -> None:
    """Raises Misconfigured for a file that would be overwritten."""
    for file in files:
        if file.exists():
            raise Misconfigured(
                f"{file} is there, perhaps of an earlier run: move it away, or replace it with --overwrite",
                param="output",
            )


def _upload(client: httpx.Client, file: Path) -> str:
    try:
        with file.open("rb") as content:
            reply = client.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": (file.name, content)}, timeout=UPLOAD_TIMEOUT_S
            )
    except httpx.HTTPError as error:
        raise no_answer(client, error) from error
    raise_for_error(reply)
    return str(reply.json()["id"])


def _follow(client: httpx.Client, batch_id: str) -> Batch:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task(batch_id, total=None)
        while True:
            found: Batch = request_json(client, f"/v1/batches/{quote(batch_id, safe='')}")
            counts = found["request_counts"]
            progress.update(
                shown,
                description=f"{batch_id} {found['status']}",
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
            if found["status"] in ENDED:
                return found
            time.sleep(PERIOD_S)


def _save(client: httpx.Client, ended: Batch, output: Path, errors: Path) -> None:
    counts = ended["request_counts"]
    status = "has failed" if ended["status"] == "failed" else f"is {ended['status']}"
    told = f": {counts['completed']} answered, {counts['failed']} not" if counts["total"] else ""
    typer.echo(f"{ended['id']} {status}{told}")
    for problem in (ended["errors"] or {"data": ()})["data"]:
        where = f"line {problem['line']}: " if problem["line"] is not None else ""
        print(f"{where}{problem['message']}", file=sys.stderr)
    for file_id, path in ((ended["output_file_id"], output), (ended["error_file_id"], errors)):
        if file_id is not None:
            _download(client, file_id, path)
            typer.echo(str(path))
            if path is errors:
                _show_reasons(errors)


def _show_reasons(file: Path) -> None:
    """Prints why the first lines of a file of errors failed."""
    with file.open("rb") as lines:
        for line in islice(lines, MAX_REASONS):
            failed = json.loads(line)
            error = failed["error"] or failed["response"]["body"]["error"]
            print(f"{failed['custom_id']}: {error['message']}", file=sys.stderr)


def _download(client: httpx.Client, file_id: str, path: Path) -> None:
    try:
        with client.stream("GET", f"/v1/files/{file_id}/content") as reply, path.open("wb") as file:
            if reply.is_error:
                reply.read()
                raise_for_error(reply)
            for part in reply.iter_bytes():
                file.write(part)
    except httpx.HTTPError as error:
        raise no_answer(client, error) from error
