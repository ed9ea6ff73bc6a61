"""Which module may know what: imports run one way, and each power has one home."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dropq

TOP = Path(__file__).parents[2]
#: The rooms of the library, lowest first, as docs/design.md lists them.
HOUSE = tuple(re.findall(r"^\| `dropq/(\w+)", (TOP / "docs" / "design.md").read_text(), re.MULTILINE))
#: The one import against the order, for types only: to its users a message's queue is a `Queue`.
UPWARDS = ("dropq.queue.message", "dropq.api")
MODULES = sorted(path for folder in ("dropq", "cli") for path in (TOP / folder).rglob("*.py"))
#: The library's own, by the names that they are imported by.
LIBRARY = {
    ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__"): path
    for path in MODULES
    if path.is_relative_to(TOP / "dropq")
}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module: many tests ask for them, and it takes a while to find them."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def dotted(node: ast.AST) -> str:
    """Return a name as it is written; empty for what is no name, such as a call."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a module imports, wherever in it: also in functions, and for the type checker only."""
    found = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & LIBRARY.keys()
            found |= set() if inner <= LIBRARY.keys() else {node.module}
    return frozenset(found)


def imports_of(module: str) -> set[str]:
    """Return the modules of the library that one of them imports."""
    return LIBRARY.keys() & imports(LIBRARY[module])


def test_every_room_of_the_library_has_its_place_in_the_house() -> None:
    present = {
        path.stem for path in (TOP / "dropq").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert present - {"__init__", "__main__", "cli"} == set(HOUSE)
    assert len(HOUSE) == len(set(HOUSE))


@pytest.mark.parametrize("room", HOUSE)
def test_nobody_imports_upwards(room: str) -> None:
    allowed = HOUSE[: HOUSE.index(room) + 1]
    upwards = {
        (module, imported)
        for module in LIBRARY
        if module.split(".")[1:2] == [room]
        for imported in imports_of(module)
        if imported.partition(".")[2].split(".")[0] not in allowed
    }
    assert upwards == ({UPWARDS} if room == "queue" else set())


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        module: {imported for imported in imports_of(module) if (module, imported) != UPWARDS} for module in LIBRARY
    }
    assert list(TopologicalSorter(graph).static_order()), "a CycleError says which"


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("watchdog", ("dropq/storage/watch.py",)),
        ("pyspark", ("dropq/spark/",)),
        ("re2", ("dropq/filters/regex.py",)),
        ("typer", ("cli/",)),
        ("rich", ("cli/",)),
        ("werkzeug", ("dropq/web/",)),
        ("jinja2", ("dropq/web/",)),
        ("waitress", ("dropq/web/server.py",)),
        ("pytest", ("dropq/testing.py",)),
    ],
)
def test_a_heavy_package_has_one_importer(package: str, home: tuple[str, ...]) -> None:
    importers = {
        str(path.relative_to(TOP)) for path in MODULES if any(name.split(".")[0] == package for name in imports(path))
    }
    assert importers
    assert all(importer.startswith(home) for importer in importers), importers


def test_only_the_storage_changes_what_lies_on_disk() -> None:
    changing = re.compile(
        r"\bos\.(rename|renames|replace|link|symlink|unlink|remove|mkdir|makedirs|rmdir|utime|fsync|truncate|chmod)\b"
    )
    found = {
        str(path.relative_to(TOP))
        for path in MODULES
        if changing.search(path.read_text()) and path.parent.name != "storage"
    }
    # The shim for a packaged Java lies in the user's cache, and the path of a socket anywhere, not in a root.
    assert found <= {"cli/exporter.py", "dropq/spark/session.py", "dropq/web/server.py", "dropq/zmq/sockets.py"}, found


#: What reads a name outside of dropq/format: it knows how a root writes reply-to.
READS_NAMES = {("dropq/lifecycle/sidecars.py", "names.parse")}
#: What only the grammar of names has: its own properties, the letters of the classes, the digits of generated ids.
OF_THE_GRAMMAR = re.compile(r"JMS_dropq|_(?:meta|lapsed|notBefore|since)[A-Z=]?|MBSPOT|(?:\\d|\[0-9\])\{1[036]\}")


def outside_the_format() -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of the modules that have to ask dropq/format what a name says."""
    for path in MODULES:
        if not path.is_relative_to(TOP / "dropq" / "format"):
            yield from ((str(path.relative_to(TOP)), node) for node in nodes(path))


def test_only_the_format_parses_names() -> None:
    called = {(module, dotted(node.func)) for module, node in outside_the_format() if isinstance(node, ast.Call)}
    readers = {
        (module, call) for module, call in called if call in ("split_claim", "names.parse", "claims.split_claim")
    }
    assert readers == READS_NAMES
    imported = {
        (module, alias.name)
        for module, node in outside_the_format()
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dropq.format")
        for alias in node.names
    }
    assert not {pair for pair in imported if pair[1] in ("parse", "split_claim")}


def test_only_the_format_knows_the_grammar_of_names() -> None:
    """Every other string that has a part of it is a sentence for people."""
    found = {
        (module, node.value)
        for module, node in outside_the_format()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OF_THE_GRAMMAR.search(node.value)
        if " " not in node.value
    }
    assert not found


def test_only_transitions_and_verbs_write_the_log() -> None:
    """Fronts, workers and the command line tell nothing: what they do is told by what they call."""
    writing = {
        str(path.relative_to(TOP))
        for path in MODULES
        if re.search(r"\blog\.(ended|act)\(|\b_ended\(", path.read_text())
    }
    rooms = {path.split("/")[1] for path in writing}
    assert rooms == {"api.py", "diagnosis", "lifecycle", "records", "staging", "upkeep"}
    assert not {path for path in writing if path.startswith("cli/")}


def test_every_package_folder_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(TOP / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {"dropq.cli"} | {
        ".".join(path.parent.relative_to(TOP).parts) for path in (TOP / "dropq").rglob("__init__.py")
    }
    assert listed == folders


def test_the_library_prints_nothing() -> None:
    printing = {
        str(path.relative_to(TOP))
        for path in MODULES
        if path.is_relative_to(TOP / "dropq")
        and any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            for node in nodes(path)
        )
    }
    assert not printing


#: What makes a process of this one; a program in a string, which a test starts, may do as it likes.
FORKS = {"fork", "forkpty", "set_start_method", "ForkProcess", "get_context('fork')"}
#: What a file has in its text if it has one of these, however it is written.
MAY_FORK = re.compile(r"\bfork(pty)?\b|set_start_method|ForkProcess")


def test_only_one_helper_of_the_tests_forks() -> None:
    """A child that does not end by `os._exit` whatever happens is a second pytest."""
    found = {
        (str(path.relative_to(TOP)), ast.unparse(node))
        for path in (TOP / "tests").rglob("*.py")
        if MAY_FORK.search(path.read_text())
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute | ast.Call) and ast.unparse(node).rpartition(".")[2] in FORKS)
        or (isinstance(node, ast.ImportFrom) and node.module != "forks" and FORKS & {name.name for name in node.names})
    }
    assert {path for path, _ in found} == {"tests/forks.py"}, found


# -- regular expressions -----------------------------------------------------------------------------------------

#: What is compiled as it comes: pieces that hold nothing but escaped text.
COMPUTED = {"'|'.join(map(translate, others))", "''.join(piece)"}
#: Takes one character at a time, or lets nobody come back to what it took.
WITHOUT_A_CHOICE = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "CATEGORY", "ATOMIC_GROUP"}


def compiled_in(module: ModuleType) -> Iterator[str | bytes]:
    """Yield the patterns that a module and its classes keep, or keep a method of."""
    kept = list(vars(module).values())
    kept += [value for one in kept if isinstance(one, type) for value in vars(one).values()]
    for value in kept:
        pattern = getattr(value, "__self__", value)
        if isinstance(pattern, re.Pattern):
            yield pattern.pattern


def written_in(module: ModuleType, computed: set[str]) -> Iterator[str | bytes]:
    """Yield the patterns in a module's calls of `re`; of one that its names do not give, keep the expression."""
    for node in nodes(Path(str(module.__file__))):
        if not (isinstance(node, ast.Call) and re.fullmatch(r"re\.(?!escape)\w+", dotted(node.func))):
            continue
        expression = ast.unparse(node.args[0])
        try:
            yield eval(expression, dict(vars(module)))
        except NameError:
            computed.add(expression)


def possessive(pattern: str | bytes) -> bool:
    """Tell whether a possessive repeat is around anything that could match in more than one way.

    Python before 3.11.5 gets those wrong, and single characters and atomic groups right: `[^"]*+`, `(?>a|ab)*+`.
    """
    found: list[bool] = []

    def look(value: Any) -> None:
        if isinstance(value, tuple) and value and str(value[0]) == "POSSESSIVE_REPEAT":
            *_, inside = value[1]
            found.append(len(inside) != 1 or str(inside[0][0]) not in WITHOUT_A_CHOICE)
        for part in () if isinstance(value, (str, int)) or value is None else value:
            look(part)

    look(import_module("re._parser").parse(pattern))
    return any(found)


def test_no_pattern_is_one_that_a_promised_python_gets_wrong() -> None:
    computed: set[str] = set()
    for path in MODULES:
        parts = [*path.relative_to(TOP).with_suffix("").parts]
        module = import_module(".".join(["dropq", *parts] if parts[0] == "cli" else parts).removesuffix(".__init__"))
        for pattern in (*compiled_in(module), *written_in(module, computed)):
            assert not possessive(pattern), f"{path}: write (?>...)*+ for (?:...)*+ in {pattern!r}"
    assert computed == COMPUTED


@pytest.mark.parametrize("pattern", [r"(?:a|ab)*+", rb"x(?:[^y]*z){2,}+", "(?:ab)?+", "(?>(?:a|b.)++c)*", "(a)*+"])
@pytest.mark.parametrize(
    "program",
    [
        "KEPT = re.compile({})",
        "kept = re.compile({}).match",
        "class C:\n K = re.compile({})",
        "def f(x): re.sub({}, '', x)",
    ],
)
def test_a_pattern_that_a_promised_python_gets_wrong_is_seen(
    tmp_path: Path, program: str, pattern: str | bytes
) -> None:
    (tmp_path / "planted.py").write_text(f"import re\n{program.format(repr(pattern))}\n")
    module = ModuleType("planted")
    module.__file__ = str(tmp_path / "planted.py")
    exec((tmp_path / "planted.py").read_text(), vars(module))
    found = [*written_in(module, set())] + ([] if "def" in program else [*compiled_in(module)])
    assert found and all(map(possessive, found))


@pytest.mark.parametrize(
    "pattern", ["[^a]*+", "a++", ".?+", r"\d{0,8}+", "(?>a|ab)*+", rb"(?>(?>x[^y]*+)++z)*+", "(?:ab)*"]
)
def test_a_possessive_repeat_of_what_has_no_choice_is_allowed(pattern: str | bytes) -> None:
    assert not possessive(pattern)


def test_no_module_has_the_name_of_a_public_function() -> None:
    """An import of the module would put it in the function's place."""
    present = {path.stem for path in (TOP / "dropq").iterdir()}
    assert present.isdisjoint(dropq.__all__)
