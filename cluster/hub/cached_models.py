"""Models in the cache of the Hugging Face hub: what each is, whether it is served, and what it needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.hub.download import cache_folder
from protos.errors import BatonError, Misconfigured
from protos.hints import suggested
from protos.model_files.gguf.gguf_file import first_shard
from protos.model_files.hub_name import HubName
from protos.model_files.opening import open_model
from workers.free_memory import RANK_BYTES
from workers.models.model_config import weight_bytes
from workers.models.served import read_served
from workers.weights.registry import stored_tensors

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.27e9, "Qwen/Qwen3-0.6B": 1.5e9, "Qwen/Qwen3-1.7B": 4.06e9,
    "Qwen/Qwen3-4B": 8.04e9, "Qwen/Qwen3-8B": 16.4e9,
}  # fmt: skip
"""Models that need no login, with the bytes of their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """`needed_bytes`: a worker's memory without its KV cache. `problem`: why the model is not served."""

    name: HubName
    num_bytes: int
    family: str = ""
    encoding: str = ""
    needed_bytes: int = 0
    problem: str = ""


def fitting_models(free_bytes: int) -> list[str]:
    """The two largest published models that leave half of the memory for KV to one prefill and one decode worker."""
    return [name for name, size in PUBLISHED.items() if 2 * (size + RANK_BYTES) < free_bytes / 2][:-3:-1]


def cached_models() -> list[ListedModel]:
    return sorted((_examined(path) for path in _paths()), key=lambda one: str(one.name))


def remove_model(text: str) -> int:
    """Removes a repository, or one commit of it, from the cache. Returns the freed bytes. Raises Misconfigured for a
    name that is not cached."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    name = HubName.of(text) or HubName(repository=text)
    folder = cache_folder(name)
    if not folder.is_dir():
        names = [str(one.name.repository) for one in cached_models()]
        raise Misconfigured(f"{text} is not in the cache: {suggested(text, names) if names else 'it is empty'}")
    try:
        cache = scan_cache_dir()
        revisions = {one.commit_hash for repo in cache.repos if repo.repo_path == folder for one in repo.revisions}
    except CacheNotFound:
        revisions = set()
    chosen = {one for one in revisions if one.startswith(name.revision)}
    if name.revision and not chosen:
        raise Misconfigured(f"{text} is not in the cache: {suggested(name.revision, revisions)}")
    if chosen != revisions:
        strategy = cache.delete_revisions(*chosen)
        strategy.execute()
        return strategy.expected_freed_size
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    shutil.rmtree(folder)  # with what was downloaded in part
    return size


def _paths() -> Iterator[Path]:
    """The folder of each cached checkpoint, and the first file of each GGUF model."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"):
        yield from {first_shard(path) for path in folder.rglob("*.gguf") if not path.name.startswith("mmproj")}
        if any(folder.glob("*.safetensors")):
            yield folder


def _examined(path: Path) -> ListedModel:
    name = HubName.of_cached(path)
    assert name is not None
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.exists())
    if path.is_dir() and (path / "adapter_config.json").is_file():
        return ListedModel(name=name, num_bytes=size, family="LoRA adapter")
    try:
        model = read_served(path)
        size = sum(file.stat().st_size for file in open_model(path).weight_files())
        stored_tensors(path)
        needed = weight_bytes(path, model.dtype) + RANK_BYTES
    except BatonError as error:
        return ListedModel(name=name, num_bytes=size, problem=error.message)
    label = getattr(getattr(model, "weight_format", None), "label", model.dtype)
    return ListedModel(name=name, num_bytes=size, family=model.family, encoding=label, needed_bytes=needed)
