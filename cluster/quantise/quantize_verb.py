"""`baton quantize`: writes a quantised checkpoint of a float one, and prints its loss on held-out text."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cluster.hub.download import local_model
from protos.errors import Misconfigured
from protos.hints import unusable
from protos.model_files.opening import open_model
from router.text.tokenizer import Tokenizer
from workers.cores import spin_briefly

spin_briefly()  # before torch: GPTQ of the demo model took 612 s beside other processes, and 110 s with it

from workers.quantise.quantise import check_float_folder, held_out_nats, quantise  # noqa: E402
from workers.quantise.recipe import Method, QuantiseRecipe  # noqa: E402

_CALIBRATION = 128  # sequences, chosen at random but the same each time
_LENGTH = 512  # tokens of a calibration sequence
_EVALUATED_LENGTH = 2048
_COMPLETE = ".json"  # texts with special tokens

Ids = list[tuple[int, ...]]


def quantize(
    model: Annotated[
        Path, typer.Argument(help="Folder of a Hugging Face checkpoint in floating point, or a hub's name.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not be there yet.")],
    method: Annotated[
        Method, typer.Option(help="rtn rounds to nearest; gptq and awq lose less, and need --calibrate.")
    ] = "rtn",
    bits: Annotated[int, typer.Option(help="Of a weight: 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 128,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text like that the model will see: .txt, or JSON lists of texts."),
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out text: prints nats a token before and after.")
    ] = None,
) -> None:
    """Quantise the weights of a checkpoint to 4 or 8 bits, and write a compressed-tensors checkpoint, which Baton, vLLM
    and transformers load."""
    recipe = _recipe(method, bits, group_size)
    model = Path(local_model(str(model)))
    config = check_float_folder(model)
    if recipe.calibrated and calibrate is None:
        raise Misconfigured(
            f"--method {method} needs a text to calibrate with: give --calibrate FILE, or --method rtn",
            param="calibrate",
        )
    tokens, held_out = asyncio.run(_texts(model, calibrate, evaluate))
    chosen = _cut(tokens, min(_LENGTH, config.max_model_len))
    whole = _cut(held_out, min(_EVALUATED_LENGTH, config.max_model_len))
    if recipe.calibrated:
        _check_tokens("calibrate", calibrate, chosen, min(_LENGTH, config.max_model_len))
    if evaluate is not None:
        _check_tokens("evaluate", evaluate, whole, 2)
    chosen = random.Random(0).sample(chosen, min(_CALIBRATION, len(chosen)))
    with _bars() as bars:
        row = bars.add_task(f"{method}, {bits} bits", total=config.num_layers)
        started_s = time.monotonic()

        def on_layer(done: int, total: int) -> None:
            bars.update(row, completed=done, total=total)
            if done == 1:  # also where no bar is drawn
                took = timedelta(seconds=round(total * (time.monotonic() - started_s)))
                bars.console.print(f"{total} layers take about {took} in all")

        quantise(model, out, recipe, chosen, on_layer)
    before, after = (_folder_bytes(folder) for folder in (model, out))
    typer.echo(f"{out}: {after / 1e6:,.1f} MB of weights, before {before / 1e6:,.1f} MB")
    if evaluate is not None:
        typer.echo(_change(held_out_nats(model, whole), held_out_nats(out, whole), sum(len(one) - 1 for one in whole)))


def _recipe(method: Method, bits: int, group_size: int) -> QuantiseRecipe:
    if bits not in (4, 8):
        raise Misconfigured(f"--bits {bits}: give 4 or 8", param="bits")
    if group_size not in (32, 64, 128):
        raise Misconfigured(f"--group-size {group_size}: give 32, 64 or 128", param="group_size")
    return QuantiseRecipe(method=method, bits=8 if bits == 8 else 4, group_size=group_size)


async def _texts(model: Path, *files: Path | None) -> list[Ids]:
    """Token ids of each file's texts."""
    given = [[] if file is None else _read(file) for file in files]
    if not any(given):
        return [[] for _ in given]
    tokenizer = Tokenizer.load(open_model(model))
    return [
        [] if file is None else list(await tokenizer.encode(texts, add_special_tokens=file.suffix != _COMPLETE))
        for file, texts in zip(files, given, strict=True)
    ]


def _read(file: Path) -> list[str]:
    """A text file is one text. JSON has a list of texts, or lists by name, as demo/model/held_out.json has."""
    try:
        text = file.read_text(encoding="utf-8")
        found: Any = json.loads(text) if file.suffix == _COMPLETE else [text]
    except OSError as error:
        raise Misconfigured(f"{file}: {unusable(error)}", param="calibrate") from error
    except ValueError as error:
        raise Misconfigured(f"{file} is neither UTF-8 text nor JSON ({error})", param="calibrate") from error
    lists = list(found.values()) if isinstance(found, dict) else [found]
    texts = [one for several in lists if isinstance(several, list) for one in several]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise Misconfigured(
            f"{file} must be plain text, a JSON list of texts, or a JSON object of such lists", param="calibrate"
        )
    return texts


def _cut(texts: Sequence[tuple[int, ...]], length: int) -> Ids:
    """Pieces of at most `length` tokens, and at least two."""
    pieces = [ids[start : start + length] for ids in texts for start in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


def _check_tokens(option: str, file: Path | None, texts: Ids, least: int) -> None:
    """Raises Misconfigured."""
    if (count := sum(map(len, texts))) < least:
        raise Misconfigured(f"--{option} {file} has {count} tokens: give text of at least {least}", param=option)


def _change(before: float, after: float, num_tokens: int) -> str:
    change = after / before - 1
    return f"held-out nats per token: {before:.4f} before, {after:.4f} after ({change:+.2%}), {num_tokens:,} tokens"


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _bars() -> Progress:
    name, layers = TextColumn("{task.description}"), TextColumn("layers")
    return Progress(
        name, BarColumn(30), MofNCompleteColumn(), layers, TimeElapsedColumn(), TextColumn("left:"),
        TimeRemainingColumn(), console=Console(stderr=True), speed_estimate_period=math.inf,
    )  # fmt: skip
