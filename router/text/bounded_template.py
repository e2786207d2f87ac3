"""Renders a checkpoint's chat template, a stranger's program, within a limit of steps, characters and time.

    only constructs whose cost is counted ──▶ here, while the counts last ──▶ text
    any other, or the counts are spent    ──▶ in a process (`protos.limited`), within `CPU_S` and its memory ──▶ text

What ordinary templates are made of is counted: evaluated nodes, at the start of each loop and call, and the characters
of texts that are put together. The longer the conversation, the more a step counts: it may copy all of it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from protos.errors import BadCheckpoint, InvalidRequest, Overloaded
from protos.limited.limited_process import PATIENCE_S, LimitedProcess, LimitedProcessEnded
from router.text import template_environment
from router.text.template_environment import MAX_CHARS, TEMPLATE_FAILURES, complete, written

CPU_S = 1.0
MAX_STEPS = 20_000_000
STEP_CHARS = 2**16
"""So many characters of a conversation double the cost of a step."""
MAX_CONSTANT = 32
"""Characters or a number in an argument of what makes a text longer."""

_COUNTED = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice,
    nodes.For, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword,
    nodes.Add, nodes.Sub, nodes.Mod, nodes.Neg, nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or,
    nodes.Not, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Macro, nodes.Continue,
    nodes.Break,
)  # fmt: skip
_LIGHT = frozenset({
    "trim", "length", "count", "first", "last", "default", "d", "lower", "upper", "capitalize", "title", "list",
    "items", "safe", "int", "float", "abs", "round", "select", "reject", "selectattr", "rejectattr", "reverse", "sort",
    "dictsort", "unique", "string", "tojson", "escape", "e",
})  # fmt: skip
_GROWING = frozenset({"join", "replace", "indent"})  # with short constants for arguments
_METHODS = frozenset({
    "startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "lower", "upper", "title",
    "capitalize", "casefold", "swapcase", "items", "keys", "values", "get", "find", "rfind", "index", "count",
    "isdigit", "isalpha", "isalnum", "isascii", "isdecimal", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "removeprefix", "removesuffix", "partition", "rpartition",
})  # fmt: skip


class _Spent(Exception):
    """A template has used up its steps or characters."""


class BoundedTemplate:
    """Renders from any thread. `is_counted`: it is rendered here unless a conversation exceeds the counts; `is_quick`:
    none has exceeded them; `was_ended`: a process had to be ended."""

    def __init__(self, source: str, local_time: Callable[[], datetime] = datetime.now) -> None:
        self._source = source
        self._environment = _CountingEnvironment()
        complete(self._environment, local_time)
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None
        self.was_ended = False
        try:
            self.tree = self._environment.parse(source)
            self.is_counted = self.is_quick = _is_counted(self.tree)
            unknown = {node.name for node in self.tree.find_all(nodes.Filter)} - self._environment.filters.keys()
            unknown |= {node.name for node in self.tree.find_all(nodes.Test)} - self._environment.tests.keys()
            if unknown:
                raise BadCheckpoint(f"the chat template has no filters or tests {', '.join(sorted(unknown))} to use")
            if self.is_counted:
                self.variables = frozenset(meta.find_undeclared_variables(self.tree))
                self._environment.count_growth()
                self._template = self._environment.from_string(source)
                # Jinja's globals are a ChainMap, slow to look up: half of the time that a rendering took.
                self._template.globals = dict(self._template.globals)
            else:
                names = self.tree.find_all(nodes.Name)
                self.variables = frozenset(name.name for name in names if name.ctx == "load")
        except (*TEMPLATE_FAILURES, SyntaxError) as error:
            raise BadCheckpoint(f"the chat template is not valid Jinja: {error}") from error

    def render(self, variables: Mapping[str, Any], num_chars: int) -> str:
        """Renders a conversation of `num_chars` characters. Raises ValueError in the template's words, InvalidRequest
        if it takes too long, and Overloaded."""
        if self.is_counted:
            counts = self._environment.counts
            counts.steps, counts.chars = MAX_STEPS // (1 + num_chars // STEP_CHARS), MAX_CHARS
            counts.item_chars = num_chars // 8
            try:
                return self._template.render(variables)
            except _Spent:
                self.is_quick = False
            except TEMPLATE_FAILURES as error:
                raise ValueError(str(error)) from error
        with self._lock:
            text, refusal = self._asked(written(self._source, variables))
        if refusal:
            raise ValueError(refusal)
        return str(text)

    def _asked(self, request: bytes) -> tuple[str, str]:
        process = self._process = self._process or LimitedProcess(Path(template_environment.__file__))
        try:
            text, refusal = json.loads(process.ask(request, CPU_S))
        except (LimitedProcessEnded, TimeoutError) as error:
            self._process, self.was_ended = None, True
            if isinstance(error, LimitedProcessEnded) and not error.is_from_outside:
                raise InvalidRequest(
                    f"The model's chat template takes more than {CPU_S:g} s or too much memory for these messages: "
                    "send fewer, or give the model another template (router.text.chat_template)",
                    param="messages",
                ) from error
            problem = "The process that writes prompts of the model's chat template was ended: come again"
            raise Overloaded(problem, retry_after_s=PATIENCE_S) from error
        return text, refusal


class _Spending(threading.local):
    steps = chars = item_chars = 0

    def step(self, num: int) -> None:
        self.steps -= num
        if self.steps < 0:
            raise _Spent

    def write(self, num: int) -> None:
        self.chars -= num
        if self.chars < 0:
            raise _Spent

    def add(self, text: Any) -> Any:
        if isinstance(text, str):
            self.write(len(text))
        return text


class _CountingEnvironment(ImmutableSandboxedEnvironment):
    """`parse` gives a template as it is written; `from_string` compiles it with its costs counted."""

    def __init__(self) -> None:
        super().__init__()
        self.intercepted_binops = frozenset(self.default_binop_table)  # so that nothing is computed during parsing
        self.counts = _Spending()
        self._size = 0

    def count_growth(self) -> None:
        counts, counted = self.counts, self.filters
        self.intercepted_binops = frozenset()
        for name in ("tojson", "string", "escape", "e", "join", "replace", "indent"):
            self.filters[name] = _charged(counted[name], counts.add)
        own = {"counted": self._counted, "added": self._added, "concatenated": self._concatenated, "modulo": _modulo}
        self.filters |= own

        def concat(parts: Iterable[str]) -> str:
            parts = list(parts)
            counts.write(sum(map(len, parts)))
            return "".join(parts)

        self.concat = concat  # type: ignore[method-assign]  # jinja2's own way of changing it

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        self._size = sum(1 for _ in source.find_all(nodes.Node))
        return super()._generate(_Costs(self).visit(source), *args, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.counts.step(__self._size if isinstance(__obj, Macro) else 8)
        return __self.counts.add(super().call(__context, __obj, *args, **kwargs))

    def _counted(self, value: Any, weight: int) -> Any:
        if not hasattr(value, "__len__"):
            value = list(value)
        self.counts.step((1 + len(value)) * weight)
        return value

    def _added(self, left: Any, right: Any) -> Any:
        if isinstance(left, list | tuple):
            self.counts.write(len(right) * self.counts.item_chars)
            self.counts.step(len(left) + len(right))
        return self.counts.add(left + right)

    def _concatenated(self, parts: list[Any]) -> str:
        return str(self.counts.add("".join(map(str, parts))))


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise _Spent  # a format may ask for any width
    return left % right


def _charged(function: Any, add: Callable[[Any], Any]) -> Any:
    def charged(*args: Any, **options: Any) -> Any:
        return add(function(*args, **options))

    for name, value in vars(function).items():
        setattr(charged, name, value)
    return charged


class _Costs(NodeTransformer):
    """Inserts counting filters into a template: around loops' inputs, and around texts and lists that are joined
    outside of the output, which is counted as it is joined."""

    def __init__(self, environment: _CountingEnvironment) -> None:
        self._filter = partial(_filter, environment=environment)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.iter = self._filter("counted", node.iter, [nodes.Const(1 + weight)])
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = [self._shown(part) for part in node.nodes]
        return node

    def _shown(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Add):
            node.left, node.right = self._shown(node.left), self._shown(node.right)
            return node
        visited: nodes.Expr = self.visit(node)
        return visited

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("added", node.left, [node.right])

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:
        self.generic_visit(node)
        match node.left:
            case nodes.Getattr(node=nodes.Name(name="loop")) | nodes.Const(value=int()):
                return node
        return self._filter("modulo", node.left, [node.right])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("concatenated", nodes.List(node.nodes), [])


def _filter(name: str, value: nodes.Node, args: list[nodes.Expr], environment: Any) -> nodes.Filter:
    made = nodes.Filter(value, name, args, [], None, None)
    made.set_lineno(1, override=True)
    made.set_environment(environment)
    return made


def _is_counted(tree: nodes.Template) -> bool:
    """Whether the work of a whole template is counted or bounded by its size."""
    macros = {node.name for node in tree.find_all(nodes.Macro)}
    assigned = {node.target.name for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)}
    spaces = {node.target.name for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.NSRef)}
    return all(
        isinstance(node, _COUNTED) and _is_bounded(node, macros, assigned | spaces)
        for child in tree.body
        for node in (child, *child.find_all(nodes.Node))
    )


def _is_bounded(node: nodes.Node, macros: set[str], assigned: set[str]) -> bool:
    match node:
        case nodes.For(recursive=True) | nodes.Name(name="loop", ctx="store" | "param"):
            return False
        case nodes.Filter(name="tojson"):
            return not node.args and all(_is_short(argument.value) for argument in node.kwargs)
        case nodes.Filter(name="map"):
            return len(node.args) <= 1 and all(_is_light(argument) for argument in node.args)
        case nodes.Filter(name=name) if name in _GROWING:
            return all(map(_is_short, (*node.args, *(argument.value for argument in node.kwargs))))
        case nodes.Filter(name=name):
            return name in _LIGHT
        case nodes.Call(node=nodes.Name(name="strftime_now")):
            return all(
                _is_short(argument) and not re.search(r"\d", str(getattr(argument, "value", "")))
                for argument in node.args
            )
        case nodes.Call(node=nodes.Name(name="dict" | "namespace")):
            return not any(_mentions(node, assigned))
        case nodes.Call(node=nodes.Name(name=name)):
            return name in ("raise_exception", "range") or name in macros
        case nodes.Call(node=nodes.Getattr(attr="join", node=separator)):
            return _is_short(separator)
        case nodes.Call(node=nodes.Getattr(attr="replace")):
            return all(map(_is_short, node.args))
        case nodes.Call(node=nodes.Getattr(attr=name)):
            return name in _METHODS
        case nodes.Call():
            return False
        case nodes.List() | nodes.Tuple() | nodes.Dict():
            # A list of lists of lists, each twice, is short and shows as a long text.
            names = list(_mentions(node, assigned))
            return not any(names) and len(names) <= 1
        case _:
            return True


def _mentions(node: nodes.Node, assigned: set[str]) -> Iterator[bool]:
    """Yields, for each variable of which the node reads more than the length, whether the variable is assigned."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Name) and child.ctx == "load":
            yield child.name in assigned
        elif not (isinstance(child, nodes.Filter) and child.name in ("length", "count")):
            yield from _mentions(child, assigned)


def _is_short(node: nodes.Node) -> bool:
    match node:
        case nodes.Const(value=str() as text):
            return len(text) <= MAX_CONSTANT
        case nodes.Const(value=int() | None as number):
            return (number or 0) <= MAX_CONSTANT
        case nodes.Tuple(items=items):
            return all(map(_is_short, items))
        case _:
            return False


def _is_light(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value in _LIGHT
