"""The definitions in the project's Python files, counted for its layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The definitions in a Python file."""

    code_lines: int
    words: int  # of docstrings and of comments on lines of their own
    functions: list[tuple[str, int, int, int]]  # name, line, code lines, parameters
    classes: list[tuple[str, int, int]]  # name, line, attributes that its methods set


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All, with those inside others; expressions are not visited."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, ()))  # type: ignore[arg-type]
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements(part.body)


def state(owner: ast.ClassDef) -> set[str]:
    """The names of the attributes that methods set on `self`."""
    return {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def extent(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)


@cache
def outline(path: Path) -> Outline:
    """A line of code is neither blank nor comment nor docstring. The file is parsed once for all tests."""
    source = (ROOT / path).read_text()
    every = list(statements(ast.parse(source, str(path)).body))
    texts = enumerate((line.strip() for line in source.splitlines()), 1)
    lines = {number for number, text in texts if text and not text.startswith("#")}
    words = sum(len(text.split()) - 1 for text in map(str.strip, source.splitlines()) if text.startswith("# "))
    for node in every:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(extent(node))
            words += len(node.value.value.split())
    functions = [node for node in every if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Outline(
        code_lines=len(lines),
        words=words,
        functions=[
            (node.name, node.lineno, len(lines.intersection(extent(node))), num_parameters(node)) for node in functions
        ],
        classes=[(node.name, node.lineno, len(state(node))) for node in every if isinstance(node, ast.ClassDef)],
    )
