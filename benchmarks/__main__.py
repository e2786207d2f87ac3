"""`python -m benchmarks` lists the benchmarks, a line each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Every module that runs as a program, with the first sentence of its docstring."""
    for path in sorted(HERE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' not in source or path.name == "__main__.py":
            continue
        name = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        paragraph = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
        sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.split()), maxsplit=1)[0]
        print(f"python -m {name:<38} {sentence}")


if __name__ == "__main__":
    main()
