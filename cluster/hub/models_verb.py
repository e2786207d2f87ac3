"""`baton models` and `baton models rm NAME`: the models in this machine's cache of the Hugging Face hub."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from cluster.cli.terminal_tables import Sheet, show
from cluster.hub.cached_models import ListedModel, cached_models, remove_model
from protos.errors import Misconfigured
from protos.hints import byte_count
from workers.free_memory import free_ram_bytes


class ModelsVerb(StrEnum):
    LIST = "list"
    RM = "rm"


def models(
    verb: Annotated[ModelsVerb, typer.Argument(help="list, or rm NAME.")] = ModelsVerb.LIST,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="As Qwen/Qwen3-0.6B.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the models of the Hugging Face hub that this machine has cached, or remove some."""
    if (verb is ModelsVerb.RM) != bool(names):
        raise Misconfigured("write it as baton models, or as baton models rm NAME", param="names")
    for name in names or ():
        typer.echo(f"{name}: removed, {byte_count(remove_model(name))}")
    if verb is ModelsVerb.LIST:
        cached = cached_models()
        rows: list[dict[str, Any]] = [asdict(one) | {"name": str(one.name)} for one in cached]
        show(rows, lambda: _table(cached), as_json=as_json)


def _table(cached: list[ListedModel]) -> RenderableType:
    sheet = Sheet(
        "cached models", "model", "commit", "size", "family", "encoding", "memory of\na worker", "served",
        left=("model", "commit", "family", "encoding", "served"), prose=("served",), spare=("commit", "encoding"),
    )  # fmt: skip
    for one in cached:
        model = f"{one.name.repository}{one.name.file and f':{one.name.file}'}"
        needed = byte_count(one.needed_bytes) if one.needed_bytes else ""
        served = one.problem or ("as an adapter" if not needed else "yes")
        commit = one.name.revision[:12]
        sheet.add_row(model, commit, byte_count(one.num_bytes), one.family, one.encoding, needed, served)
    free = f"{byte_count(free_ram_bytes())} of memory are free; a worker's KV cache comes on top"
    return Group(sheet, free) if cached else "no model is cached: baton up NAME downloads one"
