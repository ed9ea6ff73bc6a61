"""Which module may know what: imports run one way, and each power has one home."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

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
