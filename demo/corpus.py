"""What the demo model reads: the standard library's own sources, its language reference, and questions about its names.

Everything comes from the Python that runs this file, so nothing is downloaded. Held-out files and names are chosen
by a hash of their name: they stay held out on every machine and in every run.
"""

import hashlib
import importlib
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    "site-packages test tests idlelib lib2to3 encodings turtledemo distutils ensurepip __phello__ __pycache__ "
    "pydoc_data lib-dynload msilib".split()
)
# Importing these opens a browser, prints a poem, starts a window or needs another operating system.
SKIPPED_MODULES = frozenset(
    "antigravity this idlelib turtledemo lib2to3 distutils ensurepip test tkinter turtle".split()
)
WELL_KNOWN_MODULES = frozenset(
    "builtins os.path math json re random itertools functools collections shutil pathlib time string textwrap copy "
    "heapq bisect statistics glob tempfile hashlib base64 contextlib os sys subprocess threading datetime asyncio csv "
    "pickle enum dataclasses logging queue uuid struct".split()
)
WELL_KNOWN_TYPES = frozenset({"str", "list", "dict", "set"})
MAX_ANSWER_CHARS = 480
MIN_ANSWER_CHARS = 20
HELD_OUT_PERCENT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text to read, such as a source file; `name` is what the split is decided by."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DocstringEntry:
    """A name of the standard library and its docstring."""

    name: str
    kind: str
    answer: str
    well_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Everything there is to read, already split; no held-out name or file occurs in the training half."""

    documents: Sequence[Document]
    entries: Sequence[DocstringEntry]
    held_out_documents: Sequence[Document]
    held_out_entries: Sequence[DocstringEntry]


def is_held_out(name: str) -> bool:
    """Whether `name` belongs to the held-out part: a pure function of the name, the same everywhere."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def load_corpus() -> Corpus:
    """Read the whole corpus from the running Python's standard library (some seconds)."""
    documents = [*source_documents(Path(sysconfig.get_path("stdlib"))), *reference_documents()]
    entries = list(library_entries())
    asked = [entry for entry in entries if entry.well_known or not is_held_out(entry.name)]
    known_answers = {entry.answer for entry in asked}
    return Corpus(
        documents=[document for document in documents if not is_held_out(document.name)],
        entries=asked,
        held_out_documents=[document for document in documents if is_held_out(document.name)],
        held_out_entries=[
            entry
            for entry in entries
            if not entry.well_known and is_held_out(entry.name) and entry.answer not in known_answers
        ],
    )


def source_documents(root: Path) -> Iterator[Document]:
    """Every useful source file below `root`, each beginning with a comment with its path."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        folders = path.relative_to(root).parts[:-1]
        if any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield Document(name=name, text=f"# {name}\n{text}")


def reference_documents() -> Iterator[Document]:
    """The language reference that `help()` prints, one document a topic."""
    from pydoc_data import topics

    for topic, text in sorted(topics.topics.items()):
        yield Document(name=f"topic:{topic}", text=f"# {topic}\n{text.strip()}\n")


def library_entries() -> Iterator[DocstringEntry]:
    """Every documented public name of the standard library: modules, functions, classes and their methods."""
    seen: set[str] = set()
    for module_name, module in public_modules():
        for entry in module_entries(module_name, module):
            if entry.name not in seen:
                seen.add(entry.name)
                yield entry


def public_modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Import every public module of the standard library that can be imported here, packages one level deep."""
    for name in ["builtins", *sorted(sys.stdlib_module_names - SKIPPED_MODULES)]:
        module = None if name.startswith("_") else import_quietly(name)
        if module is None:
            continue
        yield name, module
        if name == "os":
            yield "os.path", os.path
        for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
            if child.name.startswith("_") or child.name in SKIPPED_FOLDERS:
                continue
            nested = import_quietly(f"{name}.{child.name}")
            if nested is not None:
                yield f"{name}.{child.name}", nested


def import_quietly(name: str) -> types.ModuleType | None:
    """Import a module, or return None where this platform or build does not have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, AttributeError, OSError):
            return None


def module_entries(module_name: str, module: types.ModuleType) -> Iterator[DocstringEntry]:
    """The entries of one module: itself, its public names, and the methods of its classes."""
    prefix = "" if module_name == "builtins" else f"{module_name}."
    famous = module_name in WELL_KNOWN_MODULES
    if module_name != "builtins":
        yield from entry_of(module_name, "module", module, well_known=famous)
    for name in public_names(module_name, module):
        thing = getattr(module, name, None)
        if inspect.isclass(thing):
            yield from entry_of(prefix + name, "class", thing, well_known=famous)
            methods_famous = not prefix and name in WELL_KNOWN_TYPES
            for method, value in sorted(vars(thing).items()):
                if not method.startswith("_") and (callable(value) or isinstance(value, classmethod | staticmethod)):
                    yield from entry_of(f"{prefix}{name}.{method}", "method", value, well_known=methods_famous)
        elif callable(thing):
            yield from entry_of(prefix + name, "function", thing, well_known=famous)


def public_names(module_name: str, module: types.ModuleType) -> list[str]:
    """The names a module offers: `__all__`, or what it defines itself (also through its C twin, `_name`)."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(declared)
    own = {module_name, f"_{module_name}", module.__name__, "builtins", "nt", "posix"}
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module_name) in own
    )


def entry_of(name: str, kind: str, thing: object, *, well_known: bool) -> Iterator[DocstringEntry]:
    """Zero or one entries: none where the object has no docstring worth learning."""
    doc = getattr(thing, "__doc__", None)
    if isinstance(doc, str):
        answer = shorten(inspect.cleandoc(doc))
        if len(answer) >= MIN_ANSWER_CHARS:
            yield DocstringEntry(name=name, kind=kind, answer=answer, well_known=well_known)


def shorten(doc: str) -> str:
    """As many whole paragraphs as fit an answer; a first paragraph that is too long ends at a sentence or a line."""
    kept = ""
    for paragraph in re.split(r"\n\s*\n", doc.strip()):
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph
        if len(longer) > MAX_ANSWER_CHARS:
            break
        kept = longer
    if kept:
        return kept
    head = doc.strip()[:MAX_ANSWER_CHARS]
    cut = max(head.rfind(". ") + 1, head.rfind(".\n") + 1)
    return head[:cut] if cut else head[: max(head.rfind("\n"), 0)].rstrip()


QUESTIONS: Mapping[str, Sequence[str]] = {
    "module": (
        "What is the `{name}` module?",
        "What does `{name}` do?",
        "What is the module `{name}` for?",
        "Tell me about the {name} module.",
    ),
    "class": (
        "What is `{name}`?",
        "What does `{name}` do?",
        "What is the class `{name}` for?",
        "Describe {name}.",
    ),
    "function": (
        "What does `{name}` do?",
        "What does {name} do?",
        "What does `{name}()` do?",
        "Explain `{name}`.",
        "How does `{name}` work?",
        "Describe {name}.",
    ),
    "method": (
        "What does `{name}` do?",
        "What does {name} do?",
        "What does the method `{name}` do?",
        "Explain `{name}`.",
    ),
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python's standard library.",
    "Answer briefly.",
    "You explain Python.",
)

HELLO = "Hello! Ask me about Python's standard library, for example: What does `os.path.join` do?"
NAME = (
    "I am Baton's demo model, a very small language model trained on Python's standard library. "
    "I answer questions about its names with their docstrings."
)
SMALL_TALK: Sequence[tuple[str, str]] = (
    ("Hello", HELLO),
    ("Hello!", HELLO),
    ("Hi", HELLO),
    ("hi there", HELLO),
    ("Good morning", HELLO),
    ("How are you?", "I am well, thank you. " + HELLO),
    ("Who are you?", NAME),
    ("What are you?", NAME),
    ("What can you do?", NAME),
    ("What is your name?", NAME),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)
