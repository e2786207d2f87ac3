"""The one place where names of the Hugging Face hub become paths. Workers read the paths and download nothing.

name ─▶ complete in the cache? ─ yes ─▶ its folder or GGUF file there
        └ no ─▶ commit and files from the hub ─▶ room on the disk? ─▶ weights: resumed, checked by SHA-256 ─▶ links
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.hub.repository_files import served_files
from protos.errors import BadCheckpoint, BatonError, Misconfigured, Unavailable
from protos.hints import byte_count, counted, unusable
from protos.model_files.folder import INDEX
from protos.model_files.hub_name import HubName

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

log = logging.getLogger("baton.cluster")

STREAMS = 4  # files at a time: one connection seldom fills a fast network
ANSWER_S = 30.0
LOOK_S = 1.0


def local_model(name: str, setting: str = "model", *, weights: bool = True) -> str:
    """The path of a model, adapter or draft on this machine: `name` itself, or the cache's path of a hub's name,
    downloaded if it is missing, safetensors only with `weights`. Blocks. Raises Misconfigured, or Unavailable if a
    later try may help."""
    hub = HubName.of(name)
    if hub is None:
        return name
    try:
        return str(_cached_path(hub, weights=weights))
    except BatonError as error:
        raise type(error)(
            f"{setting}: {error.message}", param=setting, retry_after_s=error.retry_after_s
        ) from error.__cause__


def latest_commit(repository: str) -> str:
    """The commit that main has now; "" if the hub does not answer within a second."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return str(HfApi().model_info(repository, timeout=LOOK_S).sha)
    except (OSError, ValueError, HTTPError):
        return ""


def cache_folder(hub: HubName) -> Path:
    """The repository's folder in the cache, which may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub.repository, repo_type="model")


def _cached_path(hub: HubName, *, weights: bool) -> Path:
    from huggingface_hub.constants import is_offline_mode

    path = _complete(hub, weights=weights)
    is_settled = not hub.revision or (cache_folder(hub) / "snapshots" / hub.revision).is_dir()
    if path is None or not (is_settled or is_offline_mode()):  # a branch or tag may have moved
        path = _downloaded(hub, weights=weights)
    else:
        log.info("%s: commit %s from the cache; %s@main asks the hub", hub, _commit(path), hub.repository)
    return path


def _complete(hub: HubName, *, weights: bool) -> Path | None:
    """The path of the model in the cache; None if a file is missing."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    ref = cache_folder(hub) / "refs" / (hub.revision or "main")
    folder = cache_folder(hub) / "snapshots" / (ref.read_text() if ref.is_file() else hub.revision or "main")
    if not folder.is_dir():
        return None
    try:
        names = [one.path for one in get_cached_repo_tree(hub.repository, revision=folder.name)]
    except CachedRepoTreeNotFoundError:  # only the hub can name the files that another program did not download
        if not is_offline_mode():
            return None
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    try:
        files = served_files(names, hub, lambda: _json(folder / INDEX), weights=weights)
    except (BadCheckpoint, OSError):
        return None
    return _path(folder, files) if all((folder / one).is_file() for one in files) else None


def _downloaded(hub: HubName, *, weights: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    with _explained(hub):
        while True:
            info = HfApi().model_info(
                hub.repository, revision=hub.revision or None, files_metadata=True, timeout=ANSWER_S
            )
            siblings, commit = {one.rfilename: one for one in info.siblings or ()}, str(info.sha)

            def index(commit: str = commit) -> Mapping[str, Any]:
                return _json(Path(hf_hub_download(hub.repository, INDEX, revision=commit)))

            files = served_files(list(siblings), hub, index, weights=weights)
            _fetch_weights(hub, commit, [siblings[one] for one in files if siblings[one].lfs is not None])
            with disable_progress_bars():  # the small files, and links to all
                patterns = [glob.escape(one) for one in files]
                folder = Path(snapshot_download(hub.repository, revision=hub.revision or None, allow_patterns=patterns))
            if folder.name == commit:  # else the revision has moved meanwhile
                return _path(folder, files)


def _fetch_weights(hub: HubName, commit: str, files: Sequence[RepoSibling]) -> None:
    blobs = cache_folder(hub) / "blobs"
    wanted = {str(one.lfs.sha256): one for one in files if one.lfs and not (blobs / one.lfs.sha256).exists()}
    if not wanted:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    partial = sum(path.stat().st_size for sha in wanted if (path := _partial(blobs / sha)).exists())
    size = sum(one.size or 0 for one in wanted.values())
    if size - partial > (free := shutil.disk_usage(blobs).free):
        raise _no_room(hub, f"{byte_count(size - partial)} are to be downloaded, {byte_count(free)} are free")
    log.info("%s: downloading %s of commit %s, %s", hub, counted(len(wanted), "file"), commit[:12], byte_count(size))
    started, stop = time.monotonic(), threading.Event()
    with ThreadPoolExecutor(STREAMS) as threads:
        try:
            work = [threads.submit(_fetch_blob, hub, commit, one, blobs / sha, stop) for sha, one in wanted.items()]
            for one in as_completed(work):
                one.result()
        finally:
            stop.set()  # after an error, or Ctrl-C: the next start resumes
            threads.shutdown(cancel_futures=True)
    seconds = time.monotonic() - started
    log.info("%s: downloaded in %.1f s, %.3f GB/s", hub, seconds, (size - partial) / seconds / 1e9)


def _fetch_blob(hub: HubName, commit: str, file: RepoSibling, blob: Path, stop: threading.Event) -> None:
    """Downloads a file into the cache, and resumes an earlier try."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    partial, size = _partial(blob), int(file.size or 0)
    with WeakFileLock(lock):  # another process downloads the same
        if blob.exists():
            return
        if partial.exists() and partial.stat().st_size > size:
            partial.unlink()
        with _PartialFile(partial, stop) as target:
            http_get(
                hf_hub_url(hub.repository, file.rfilename, revision=commit), target, resume_size=target.tell(),
                headers=build_hf_headers(), expected_size=size, displayed_filename=file.rfilename,
            )  # fmt: skip
        with partial.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != blob.name:
            partial.unlink()
            raise Unavailable(
                f"{hub}: {file.rfilename} came with the SHA-256 {digest}, not {blob.name}: it is dropped; start again, "
                "or check HF_ENDPOINT and the proxies in between"
            )
        partial.replace(blob)


class _PartialFile(io.BufferedWriter):
    """Appends to a file until `stop` is set."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "a"))
        self._stop = stop

    def write(self, content: Any, /) -> int:
        if self._stop.is_set():
            raise InterruptedError
        return super().write(content)


@contextmanager
def _explained(hub: HubName) -> Iterator[None]:
    """Raises the hub's errors as Baton's."""
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        hidden = isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception)
        raise _baton_error(hub, error.__cause__ if hidden else error) from error


def _baton_error(hub: HubName, error: BaseException | None) -> BatonError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )  # fmt: skip

    at, reply = constants.ENDPOINT, error.response if isinstance(error, HfHubHTTPError) else None
    status = reply.status_code if reply is not None else 0
    if isinstance(error, GatedRepoError) or status == 403:
        return Misconfigured(
            f"{hub} is gated: ask for access at {at}/{hub.repository}, then run `hf auth login`, or set HF_TOKEN to a "
            "token that has it"
        )
    if isinstance(error, RevisionNotFoundError):
        return Misconfigured(f"{hub.repository} has no revision {hub.revision}: give a branch, a tag or a commit")
    if isinstance(error, HFValidationError) or status in (401, 404):
        return Misconfigured(
            f"there is no folder or file {hub}, and no repository {hub.repository} at {at}: correct it; for a private "
            "one run `hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return Misconfigured(
            f"{hub} is not complete in the cache, {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it, or "
            "give a folder"
        )
    if reply is not None:
        wait = str(reply.headers.get("Retry-After", ""))
        when = f"in {wait} s" if wait else "later"
        limit = ", or log in with `hf auth login`, which raises the limit" if status == 429 else ""
        return Unavailable(
            f"{at} answers {status} for {hub}: start again {when}{limit}",
            retry_after_s=float(wait) if wait.isdigit() else None,
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(hub, "the disk is full")
    if isinstance(error, OSError) and error.errno is not None:
        return Misconfigured(
            f"{hub}: {error.filename or cache_folder(hub)}: {unusable(error, to_write=True)} (HF_HOME)"
        )
    return Unavailable(
        f"{hub}: {at} cannot be reached, or broke off ({error}): what has arrived is kept; check the network, or "
        "HF_ENDPOINT, and start again"
    )


def _no_room(hub: HubName, problem: str) -> BatonError:
    folder = cache_folder(hub).parent
    return Misconfigured(f"{hub}: {problem} in {folder}: make room (`baton models`), or set HF_HOME to another disk")


def _path(folder: Path, files: Sequence[str]) -> Path:
    return folder / files[0] if files[0].lower().endswith(".gguf") else folder


def _commit(path: Path) -> str:
    hub = HubName.of_cached(path)
    return hub.revision[:12] if hub is not None else ""


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
