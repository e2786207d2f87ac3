"""Compiles everything in C and C++ into a folder, once an instruction set: python deploy/prebuild.py FOLDER.

For images without a compiler, which name the folder in BATON_PREBUILT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtransfer.native import prebuild_c
from kvtransfer.prebuilt import instruction_sets
from workers.kernels.cpu.native_build import prebuild_library

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("kvtransfer/hashing.c", "router/prefix/table_index.c", "router/streaming/token_sink.c")


def main(folder: Path) -> None:
    for instructions in instruction_sets():
        for source in SOURCES:
            print(prebuild_c(ROOT / source, folder, instructions))
        print(prebuild_library(folder, instructions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
