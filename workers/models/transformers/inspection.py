"""`python -m workers.models.transformers.inspection MODEL QUANTIZE`: prints the model's `TransformersConfig`, or the
error, as a line of JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from protos.errors import BatonError
from protos.wire import error_info
from workers.models.transformers.reading import read_traced


def main(path: str, quantize: str) -> None:
    try:
        answer = read_traced(Path(path), quantize).config.to_json()  # type: ignore[arg-type]
    except BatonError as error:
        answer = {"error": msgspec.to_builtins(error_info(error))}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
