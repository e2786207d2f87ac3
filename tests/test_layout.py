"""The house rules that no other tool checks. Each failure names the file and the fix."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.outlines import outline

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "router", "workers", "prefill_pool", "decode_pool", "kvtransfer", "protos")
TOP_LEVEL = {
    *PACKAGES, "deploy", "tests", "benchmarks", "demo", "docs", "pyproject.toml", "constraints.txt",
    "constraints-cuda.txt", "README.md", "LICENSE", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".gitignore",
}  # fmt: skip
DRAWERS = {"utils", "util", "common", "helpers", "helper", "core", "misc", "shared", "lib"}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES = 14
MAX_PARAMETERS = 12
MAX_CODE_LINES = 68_000  # of the packages together: what adds lines takes others away. The aim is 62,000
MAX_PROSE = 1.6  # words of docstrings and comments a code line of the packages. The aim is 1.2
MAX_STATE = {"Device": 27, "SimulatedEngineLoop": 28, "SimulatedWorker": 23, "Fleet": 24}  # 20 attributes elsewhere
LISTS = {"workers/models/families"}  # folders of like things, which may have any number
MAX_ROUTER = 11, 110  # floors, and arrows between them: a folder or module of the router imports another
MAX_COLUMNS = 160  # of a document
CAPPED = (*PACKAGES, "benchmarks")

# Reading these formats can run code. Ray pickles what actors are given: that is Ray's own, and imports nothing here.
RUNS_CODE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
RUNS_CODE_TOO = {"torch.load", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}

# Decisions are tested in milliseconds and simulated by the million: these modules, and all of a folder, never reach a
# tensor.
PURE = (
    "kvtransfer.events", "kvtransfer.hashing", "kvtransfer.lane_rules", "kvtransfer.ticket_ledger",
    "kvtransfer.reshard", "kvtransfer.push_session", "kvtransfer.transport", "workers.batch", "workers.scheduling",
    "workers.kv.block_pool", "workers.kv.host", "workers.speculation.acceptance", "workers.speculation.cost",
    "workers.speculation.lengths", "workers.speculation.payoff", "workers.speculation.proposer",
    "workers.speculation.proposers", "workers.speculation.registry", "workers.speculation.speculation",
)  # fmt: skip
HEAVY = ("torch", "triton", "ray", "transformers")


@cache
def written() -> tuple[Path, ...]:
    """Every file git tracks or would track, relative to the root, that was not generated."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    paths = [Path(name) for name in sorted(set(listed.split("\0"))) if name and (ROOT / name).is_file()]
    return tuple(path for path in paths if not GENERATED.search(path.name))


def files(pattern: str = "*") -> list[Path]:
    """The written files that match the glob."""
    return [path for path in written() if path.match(pattern)]


def report(offences: Iterator[str]) -> None:
    """Fail with one offence a line."""
    if lines := list(offences):
        pytest.fail("\n".join(lines), pytrace=False)


def test_loggers_are_named_below_baton() -> None:
    def offences() -> Iterator[str]:
        for path in files("*.py"):
            if path.parts[0] in PACKAGES and "getLogger(__name__)" in (ROOT / path).read_text():
                yield f'{path}: getLogger(__name__) is in no log: name it "baton.PART"'

    report(offences())


def test_no_package_can_execute_what_it_reads() -> None:
    """Between our processes travels msgpack of listed types (`protos.codec`), on disk safetensors and JSON."""

    def offences() -> Iterator[str]:
        words = re.compile("|".join(re.escape(name) for name in RUNS_CODE | RUNS_CODE_TOO))
        for path in files("*.py"):
            source = (ROOT / path).read_text() if path.parts[0] in PACKAGES else ""
            for node in ast.walk(ast.parse(source, str(path))) if words.search(source) else ():
                if isinstance(node, ast.Import):
                    names = {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
                elif isinstance(node, ast.Attribute):
                    names = {node.attr} - RUNS_CODE | ({ast.unparse(node)} if node.attr == "load" else set())
                else:
                    continue
                for name in sorted(names & RUNS_CODE | names & RUNS_CODE_TOO):
                    yield f"{path}:{node.lineno}: {name} can run code that it reads: use protos.codec or safetensors"

    report(offences())


def test_files_and_functions_stay_small() -> None:
    def offences() -> Iterator[str]:
        for path in files("*.py"):
            sizes = outline(path)
            if sizes.code_lines > MAX_FILE_LINES:
                yield f"{path}: {sizes.code_lines} code lines, the cap is {MAX_FILE_LINES}: split it by responsibility"
            for name, line, size, parameters in sizes.functions:
                where = f"{path}:{line}: {name}"
                if size > MAX_FUNCTION_LINES:
                    yield f"{where} has {size} code lines, the cap is {MAX_FUNCTION_LINES}: extract its steps"
                if parameters > MAX_PARAMETERS and path.parts[0] in PACKAGES and "kernels" not in path.parts:
                    yield f"{where} has {parameters} parameters, the cap is {MAX_PARAMETERS}: make a value of some"

    report(offences())


def test_the_packages_do_not_grow() -> None:
    outlines = [outline(path) for path in files("*.py") if path.parts[0] in PACKAGES]
    lines = sum(one.code_lines for one in outlines)
    assert lines <= MAX_CODE_LINES, "take as many lines away elsewhere"
    assert sum(one.words for one in outlines) <= MAX_PROSE * lines, "delete docstrings that repeat a name"


def test_objects_have_little_state() -> None:
    report(
        f"{path}:{line}: {name} has {count} attributes, the cap is {MAX_STATE.get(name, 20)}: give some an owner"
        for path in files("*.py")
        if path.parts[0] in PACKAGES
        for name, line, count in outline(path).classes
        if count > MAX_STATE.get(name, 20)
    )


def test_docstrings_begin_with_their_subject() -> None:
    """A docstring that continues the name of its function cannot be read alone."""
    begins = re.compile(r"(Of|That of|Those|As|What)\b")
    report(
        f"{path}:{node.lineno}: begin with the subject, not with {begun.group()!r}"
        for path in files("*.py")
        if path.parts[0] in (*PACKAGES, "tests") and not GENERATED.search(path.name)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if (begun := begins.match(node.value.value.strip()))
    )


def test_modules_have_names_of_their_own() -> None:
    """A name in a traceback or a search says which file it is."""
    files = [p for p in written() if p.suffix == ".py" and p.parts[0] in PACKAGES]
    names = Counter(p.name for p in files if p.name not in ("__init__.py", "registry.py"))
    assert [str(p) for p in files if names[p.name] > 1] == []


def test_class_names_exist_once() -> None:
    """In the product, the benchmarks, the demo and the installer: a name means one thing wherever it is read."""
    places: dict[str, list[str]] = {}
    for path in files("*.py"):
        if path.parts[0] in (*PACKAGES, "benchmarks", "demo", "deploy"):
            for name, line, _ in outline(path).classes:
                places.setdefault(name, []).append(f"{path}:{line}")
    report(
        f"class {name} is in {' and '.join(where)}: give all but one a name that says what it is"
        for name, where in sorted(places.items())
        if len(where) > 1
    )


def test_folders_stay_small() -> None:
    modules = Counter(path.parent for path in files("*.py") if path.parts[0] in CAPPED and path.name != "__init__.py")
    report(
        f"{folder}: {count} modules, the cap is {MAX_MODULES}: give what belongs together a folder of its own"
        for folder, count in sorted(modules.items())
        if count > MAX_MODULES and str(folder) not in LISTS
    )


def test_unit_tests_follow_the_packages() -> None:
    """The tests of `router/fleet/fleet.py` are in `tests/unit/router/fleet/`."""
    unit = Path("tests", "unit")
    folders = {path.parent.relative_to(unit) for path in files("*.py") if path.is_relative_to(unit)}
    report(
        f"{unit / folder}: there is no {folder}/: move these tests into the folder of what they test"
        for folder in sorted(folders)
        if not (ROOT / folder).is_dir()
    )


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups in which each reaches each other (Tarjan's strongly connected components of more than one)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in sorted(arrows.get(name, ())):
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            first = stack.index(name)
            if len(stack) - first > 1:
                groups.append(sorted(stack[first:]))
            del stack[first:]

    for name in sorted(arrows):
        if name not in numbers:
            visit(name)
    return groups


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Each module, and those that it imports, within a function as well, but not for types only."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_no_circle_of_files(imports: dict[str, set[str]]) -> None:
    report(
        f"{' <-> '.join(circle)}: each imports another: move what they share below them" for circle in circles(imports)
    )


def test_no_circle_of_rooms(imports: dict[str, set[str]]) -> None:
    """A room is a folder without folders. A module beside folders is a room of its own, above or below them."""
    folders = {module.rpartition(".")[0] for module in imports} | set(PACKAGES)
    parents = {folder.rpartition(".")[0] for folder in folders}

    def room(module: str) -> str:
        folder = module.rpartition(".")[0]
        return module if module in folders or folder in parents else folder

    arrows: dict[str, set[str]] = {}
    for module, others in imports.items():
        mine = arrows.setdefault(room(module), set())
        mine.update({room(other) for other in others} - {room(module)})
    report(f"{' <-> '.join(circle)}: rooms import each other: move a module" for circle in circles(arrows))


def test_the_router_can_be_held_in_mind(imports: dict[str, set[str]]) -> None:
    """A floor is above the floors that it imports; without a circle there is a lowest."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    arrows: dict[str, set[str]] = {}
    for module, others in imports.items():
        if module.startswith("router."):
            mine = arrows.setdefault(room(module), set())
            mine.update({room(other) for other in others if other.startswith("router.")} - {room(module)})
    assert not circles(arrows)
    floors = cache(lambda name: 1 + max(map(floors, arrows[name]), default=0))
    num_floors, num_arrows = max(map(floors, arrows)), sum(map(len, arrows.values()))
    assert num_floors <= MAX_ROUTER[0]
    assert num_arrows <= MAX_ROUTER[1]


def test_there_are_no_drawer_modules() -> None:
    report(
        f"{path}: '{name}' is a drawer: put each thing into the lowest package that owns it"
        for path in files("*.py")
        for name in (*path.parts[:-1], path.stem)
        if name in DRAWERS
    )


def test_an_installed_copy_has_every_file() -> None:
    """Kernels are compiled from sources beside the modules, and the demo's weights are read: a wheel needs them."""
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    report(
        f"{path}: no wheel would have it: add its suffix to package-data in pyproject.toml"
        for path in files()
        if path.parts[0] in (*PACKAGES, "demo") and path.suffix not in (".py", ".md")
        if not any(path.match(pattern) for pattern in packaged)
    )


def test_the_top_level_is_fixed() -> None:
    report(
        f"{top}: not an allowed top-level entry: move it into a package, deploy/, demo/, docs/ or benchmarks/"
        for top in sorted({path.parts[0] for path in files()} - TOP_LEVEL)
    )


def test_files_name_no_machine_and_no_registry() -> None:
    machine = re.compile(r"/(?<![\w.~]/)(?:(?:work|root)\b|tmp/\w)")
    registry = re.compile(
        r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|npmjs\.(?:org|com)|crates\.io|debian\.org"
        r"|docker\.io|\bgcr\.io|ghcr\.io|nvcr\.io|quay\.io|registry\.k8s\.io"
    )

    def offences() -> Iterator[str]:
        for path in files():
            try:
                text = (ROOT / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # weights and pictures
            anywhere = machine.search(text) or registry.search(text)
            for number, line in enumerate(text.splitlines() if anywhere else (), 1):
                if match := machine.search(line):
                    yield f"{path}:{number}: {match.group()} exists on one machine only: take it as a setting"
                if match := registry.search(line):
                    yield f"{path}:{number}: {match.group()} is a registry: leave it to pip's or Docker's settings"

    report(offences())


def test_documents_name_files_that_exist() -> None:
    tops = "|".join((*PACKAGES, "benchmarks", "demo", "deploy", "docs", "tests"))
    path_named = re.compile(rf"(?<![\w./-])((?:{tops})/[\w./-]+\.(?:py|c|cpp|h|sh|html|js|css|md|yaml|toml|proto))\b")
    folder_named = re.compile(rf"`((?:{tops})/(?:[\w.-]+/)*)`")
    program = re.compile(rf"python -m ((?:{tops})(?:\.\w+)*)")

    def offences() -> Iterator[str]:
        for path in files("*.md"):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                for name in path_named.findall(line):
                    if not (ROOT / name).is_file():
                        yield f"{path}:{number}: there is no {name}"
                for name in folder_named.findall(line):
                    if not (ROOT / name).is_dir():
                        yield f"{path}:{number}: there is no folder {name}"
                for name in program.findall(line):
                    module = ROOT / name.replace(".", "/")
                    if not module.with_suffix(".py").is_file() and not (module / "__main__.py").is_file():
                        yield f"{path}:{number}: `python -m {name}` does not run"

    report(offences())


def test_architecture_lists_every_folder() -> None:
    """Its tables, headed by a package's folder, have each folder of that package, and no other."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^\| `(\w+)/` \| \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)

    def offences() -> Iterator[str]:
        for package, rows in tables:
            listed = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)/`", row.split("|")[1])}
            there = {path.parts[1] for path in files("*.py") if path.parts[0] == package and len(path.parts) > 2}
            yield from (f"docs/architecture.md: there is no {package}/{name}/" for name in sorted(listed - there))
            yield from (f"docs/architecture.md: {package}/{name}/ has no row" for name in sorted(there - listed))

    assert {package for package, _ in tables} == {"router", "cluster", "workers"}
    report(offences())


def test_documents_name_settings_that_exist() -> None:
    """Another test compares docs/settings.md with the code."""
    page = (ROOT / "docs" / "settings.md").read_text()
    settings = {
        f"{section}.{name}"
        for section, table in re.findall(r"^## \[([\w.]+)\]\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        for name in re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    }
    sections = "|".join(sorted({name.partition(".")[0] for name in settings}))
    named = re.compile(rf"`(?:--set )?((?:{sections})(?:\.\w+)+)[`=]")
    report(
        f"{path}:{number}: there is no setting {name}: docs/settings.md lists them"
        for path in files("*.md")
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        for name in named.findall(line)
        if name not in settings and not (ROOT / f"{name.replace('.', '/')}.py").is_file()
    )


def test_documents_are_narrow() -> None:
    """Tables and code blocks, too: what is wider wraps in a terminal, and a diff of it cannot be read."""
    report(
        f"{path}:{number}: {len(line)} columns, the cap is {MAX_COLUMNS}: wrap it, or give a table fewer words"
        for path in files("*.md")
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    )


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_link_to_existing_targets() -> None:
    inline, reference = re.compile(r"\]\(([^)\s]+)\)"), re.compile(r"^\[[^\]]+\]: (\S+)$")

    def offences() -> Iterator[str]:
        for path in files("*.md"):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                for link in (*inline.findall(re.sub(r"`[^`]*`", "", line)), *reference.findall(line)):
                    name, _, anchor = link.partition("#")
                    if "://" in link:
                        continue
                    target = Path(os.path.normpath(path.parent / name)) if name else path
                    if not (ROOT / target).exists():
                        yield f"{path}:{number}: there is no {target}"
                    elif anchor and anchor not in anchors(target):
                        yield f"{path}:{number}: {target} has no heading for #{anchor}"

    report(offences())


def test_decisions_name_their_topic_and_are_listed() -> None:
    listed = (ROOT / "docs" / "architecture.md").read_text()

    def offences() -> Iterator[str]:
        for path in files("docs/adr/*.md"):
            title = (ROOT / path).read_text().partition("\n")[0]
            if not re.match(rf"# {path.name[:4]}\. [A-Z][\w ]+: ", title):
                yield f'{path}: "{title}": begin it with the number and the topic: # {path.name[:4]}. KV transfer: ...'
            if f"(adr/{path.name})" not in listed:
                yield f"{path}: docs/architecture.md does not list it"

    report(offences())


def test_packages_are_imported_from_this_checkout(tmp_path: Path) -> None:
    """From any folder, without PYTHONPATH: this is how the `baton` command and Ray's workers see them."""
    if (ROOT / ".venv").is_symlink():
        pytest.skip("this worktree borrows another checkout's environment: PYTHONPATH says what is imported")
    program = f"import importlib, json; print(json.dumps([importlib.import_module(n).__file__ for n in {PACKAGES}]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True)
    report(
        f"{name} is imported from {origin}, not from {ROOT / name}: run `make check`, which installs this checkout"
        for name, origin in zip(PACKAGES, json.loads(output), strict=True)
        if Path(origin) != ROOT / name / "__init__.py"
    )


def modules_of(part: str) -> list[str]:
    """The module of this name, or every module of the folder, itself included; none if neither exists."""
    path = Path(*part.split("."))
    names = [
        file.with_suffix("").parts for file in files("*.py") if file == path.with_suffix(".py") or path in file.parents
    ]
    return [".".join(parts).removesuffix(".__init__") for parts in names]


def test_pure_modules_exist() -> None:
    report(
        f"there is no {part}: give PURE in {Path(__file__).name} its new name" for part in PURE if not modules_of(part)
    )


def test_pure_modules_never_name_a_heavy_library() -> None:
    """Every import statement counts, also one inside a function that no test happens to call."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    chains = (
        (module, graph.find_shortest_chain(module, heavy))
        for part in PURE
        for module in modules_of(part)
        for heavy in HEAVY
        if heavy in graph.modules
    )
    report(f"{module}: imports {' -> '.join(chain)}: cut the chain" for module, chain in chains if chain)


def test_light_parts_load_without_heavy_libraries() -> None:
    """The modules that really load, packages' __init__ included: the pure modules, and every module of the light
    folders."""
    parts = {part: modules_of(part) for part in (*PURE, "router", "protos")}
    program = f"""
import importlib, sys, traceback
sys.modules.update(dict.fromkeys({HEAVY}))
for part, modules in {parts}.items():
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError:
        traceback.print_exc()
        sys.exit(f"{{part}} must load without {", ".join(HEAVY)}")
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(result.stderr, pytrace=False)


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.check_call(
        ["make", "--silent", "--assume-old=.venv/.installed-dev", "protos", f"OUT={tmp_path}"], cwd=ROOT
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").iterdir() if GENERATED.search(path.name)}
    report(
        f"protos/{name}: does not match its .proto: run `make protos` and commit the result"
        for name in sorted(fresh.keys() | committed.keys())
        if fresh.get(name) != committed.get(name)
    )
