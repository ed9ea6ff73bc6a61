"""Which module may know what: imports run one way, and each power has one home."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOP = Path(__file__).parent.parent
#: The modules of the library, lowest first, as docs/design.md lists them: nobody imports what stands below itself here.
HOUSE = (
    "errors",
    "durations",
    "names",
    "filters",
    "layout",
    "properties",
    "mounts",
    "locks",
    "storage",
    "watch",
    "config",
    "sidecars",
    "reasons",
    "lifecycle",
    "ready",
    "consumers",
    "deferred",
    "message",
    "admission",
    "staging",
    "journal",
    "sweep",
    "findings",
    "diagnoses",
    "subscription",
    "explain",
    "admin",
    "replay",
    "opening",
    "producer",
    "queue",
    "root",
    "strays",
    "fsck",
    "health",
    "doctor",
    "guard",
    "worker",
    "command",
)
#: The one verb that needs what stands above it, and imports it when it is called: `queue.fsck()`.
LATE = {"queue": {"fsck"}}
MODULES = sorted(path for folder in ("dropq", "cli") for path in (TOP / folder).rglob("*.py"))


def runtime_imports(path: Path) -> Iterator[str]:
    """Yield what a module imports when it runs: not what only the type checker sees."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_of_the_library_has_its_place_in_the_house() -> None:
    present = {path.stem for path in (TOP / "dropq").glob("*.py")} - {"__init__", "__main__"}
    assert present | {"admission", "filters"} == set(HOUSE)


@pytest.mark.parametrize("module", HOUSE)
def test_nobody_imports_upwards(module: str) -> None:
    allowed = set(HOUSE[: HOUSE.index(module)]) | LATE.get(module, set())
    folder = TOP / "dropq" / module
    imported = {
        name.split(".")[1]
        for path in (folder.glob("*.py") if folder.is_dir() else [folder.with_suffix(".py")])
        for name in runtime_imports(path)
        if name.startswith("dropq.") and name.split(".")[1] in HOUSE
    } - {module}
    assert imported <= allowed, f"{module} imports {sorted(imported - allowed)}"


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("watchdog", ("dropq/watch.py",)),
        ("pyspark", ("dropq/spark/",)),
        ("re2", ("dropq/filters/regex.py",)),
        ("typer", ("cli/",)),
        ("rich", ("cli/",)),
    ],
)
def test_a_heavy_package_has_one_importer(package: str, home: tuple[str, ...]) -> None:
    importers = {
        str(path.relative_to(TOP))
        for path in MODULES
        if any(name.split(".")[0] == package for name in runtime_imports(path))
    }
    assert importers
    assert all(importer.startswith(home) for importer in importers), importers


def test_only_the_storage_changes_what_lies_on_disk() -> None:
    changing = re.compile(r"\bos\.(rename|renames|replace|link|symlink|unlink|remove|rmdir|fsync|truncate|chmod)\b")
    found = {
        str(path.relative_to(TOP))
        for path in MODULES
        if changing.search(path.read_text()) and path.name != "storage.py"
    }
    # The shim for a packaged Java lies in the user's cache, not in a root.
    assert found <= {"dropq/spark/session.py"}, found


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
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert not printing


# -- regular expressions -----------------------------------------------------------------------------------------

#: What is compiled as it comes: out of a configuration, or of pieces that hold nothing but escaped text.
COMPUTED = {"topic", "str(topic.value)", "'|'.join(map(translate, others))", "''.join(piece)"}
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
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if not (isinstance(node, ast.Call) and re.fullmatch(r"re\.(?!escape)\w+", ast.unparse(node.func))):
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
