"""Change the code in one small way, and see whether a test tells: `make mutants`.

A mutant is a module with one change in it. It is run in a copy of the tree, against the tests that run the changed
statement, which is found out by running each test file once over modules that keep account. The first test that fails
kills it, and so does one that hangs. What lives is either explained in survivors.toml, by a sentence, or a test is
missing.

Exit codes of `python -m torture.mutants`: 0 every mutant was killed or is explained; 1 one lives that is not.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from torture.chosen import CHOSEN, PASSED
from torture.hits import HITS
from torture.table import NotRun

TOP = Path(__file__).parents[2]
#: The modules that are changed.
MODULES = (
    "dropq/lifecycle/processing.py",
    "dropq/lifecycle/expiry.py",
    "dropq/lifecycle/moving.py",
    "dropq/lifecycle/naming.py",
    "dropq/lifecycle/sending.py",
    "dropq/lifecycle/settlement.py",
    "dropq/storage/liveness.py",
    "dropq/storage/locks.py",
    "dropq/staging/jobs.py",
    "dropq/policies/*.py",
)
SURVIVORS = Path(__file__).with_name("survivors.toml")
#: What was measured of each test file, kept from run to run.
KEPT = TOP / ".torture" / "mutants.json"

#: Seconds that the tests of a mutant may take in all, as they were measured; the shortest are asked first.
ENOUGH = 120.0
#: Seconds that a test may take beyond what it was measured to take, before it counts as hanging.
HANGS = 20.0
#: Seconds that pytest may take to begin and to end.
BEGINS = 60.0
#: Tests that start Spark take too long to be asked.
LEFT_OUT = "not spark and not cluster"
#: What is not copied.
NOT_COPIED = (".git", ".venv", ".torture", ".hypothesis", ".*_cache", "__pycache__", "*.egg-info", "build", "dist")

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- the mutants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change of a module: which bytes of its source are replaced by what."""

    path: str
    where: str  #: the function, with its class
    line: int  #: the first line of the statement that is changed
    start: int
    end: int
    text: str
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.where}: {self.was} -> {self.becomes}"

    @property
    def statement(self) -> str:
        """The statement, as the tests that run it are found by."""
        return f"{self.path}:{self.line}"

    def of(self, source: bytes) -> bytes:
        """Return the module with the change in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """List a module's mutants, in the order of its source."""
    lister = _Lister(path, source)
    lister.visit(ast.parse(source))
    return sorted(lister.found, key=lambda mutant: (mutant.start, mutant.end, mutant.becomes))


class _Lister(ast.NodeVisitor):
    """Walks through a module's functions; what is said to people, and what only the type checker reads, stays."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._functions = 0
        self._line = 0
        self._around = ""

    def _add(self, first: ast.AST, was: str, becomes: str, *, last: ast.AST | None = None, text: str = "") -> None:
        start = self._starts[first.lineno - 1] + first.col_offset  # type: ignore[attr-defined]
        ends = last or first
        end = self._starts[ends.end_lineno - 1] + ends.end_col_offset  # type: ignore[attr-defined]
        where = ".".join(self._names)
        text = text or f"({becomes})"
        self.found.append(Mutant(self._path, where, self._line, start, end, text, " ".join(was.split()), becomes))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef | _Function):
            self._enter(node)
        elif not self._functions:
            self.generic_visit(node)
        elif not _is_for_people(node):
            if isinstance(node, ast.stmt):
                self._line = node.lineno
            self._change(node)
            self._descend(node)

    def _enter(self, node: ast.ClassDef | _Function) -> None:
        self._names.append(node.name)
        is_function = not isinstance(node, ast.ClassDef)
        self._functions += is_function
        for statement in node.body:
            self.visit(statement)
        self._functions -= is_function
        self._names.pop()

    def _descend(self, node: ast.AST) -> None:
        """Visit what is inside; a statement's own expressions come before the statements that it holds."""
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            return
        line, around = self._line, ast.unparse(node).partition("\n")[0]
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._line, self._around = line, around
                    self.visit(child)
        self._line = line

    def _change(self, node: ast.AST) -> None:
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                self._add(node, ast.unparse(node), ast.unparse(body))
                self._add(node, ast.unparse(node), ast.unparse(orelse))
            case ast.keyword(arg=str(name), value=ast.Constant(value=bool(value)) as constant):
                self._add(constant, f"{name}={value}", f"{name}={not value}", text=str(not value))
            case ast.If(test=test):
                self._add(test, f"if {ast.unparse(test)}", "if True", text="True")
                self._add(test, f"if {ast.unparse(test)}", "if False", text="False")
            case ast.While(test=test) if not isinstance(test, ast.Constant):
                self._add(test, f"while {ast.unparse(test)}", "while False", text="False")
            case ast.comprehension(ifs=conditions):
                for test in conditions:
                    self._add(test, f"for ... if {ast.unparse(test)}", "for ... if True", text="True")
            case ast.BoolOp(op=op, values=values):
                other: ast.boolop = ast.And() if isinstance(op, ast.Or) else ast.Or()
                self._add(node, ast.unparse(node), ast.unparse(ast.BoolOp(other, values)))
                for dropped in values:
                    kept = [value for value in values if value is not dropped]
                    rest = kept[0] if len(kept) == 1 else ast.BoolOp(op, kept)
                    self._add(node, ast.unparse(node), ast.unparse(rest))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._add(node, ast.unparse(node), ast.unparse(operand))
            case ast.Compare(left=left, ops=[one], comparators=comparators) if type(one) in _OPPOSITE:
                opposite = ast.Compare(left, [_OPPOSITE[type(one)]()], comparators)
                self._add(node, ast.unparse(node), ast.unparse(opposite))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OTHER_OPERATOR:
                other_result = ast.BinOp(left, _OTHER_OPERATOR[type(operator)](), right)
                self._add(node, ast.unparse(node), ast.unparse(other_result))
            case ast.Constant(value=bool(truth)):
                self._add(node, f"{truth} in {self._around}", str(not truth))
            case ast.Constant(value=int(number)) if number < 10:
                self._add(node, f"{number} in {self._around}", str(number + 1))
            case ast.Call(func=ast.Name(id=called) as function) if called in _OTHER_CALL:
                self._add(function, ast.unparse(node), f"{_OTHER_CALL[called]}(...)", text=_OTHER_CALL[called])
            case ast.Call(func=ast.Name(id="suppress"), args=[_, *_]):
                self._add(node, ast.unparse(node), "suppress()", text="suppress()")
            case ast.ExceptHandler(body=handled) if ast.unparse(handled[0]) != "raise":
                self._line = handled[0].lineno
                said = "; ".join(map(ast.unparse, handled))
                self._add(handled[0], f"except {ast.unparse(node.type) if node.type else ''}: {said}", "raise",
                          last=handled[-1], text="raise")  # fmt: skip
            case ast.Return(value=ast.expr() as returned) if not isinstance(returned, ast.Constant):
                self._add(returned, ast.unparse(node), "return None", text="None")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                self._add(node, ast.unparse(node), "pass", text="pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if self._names[-1] != "__init__":
                self._add(node, ast.unparse(node), "pass", text="pass")


def _is_for_people(node: ast.AST) -> bool:
    """Tell whether something only says what is wrong: a text, a line of the log, an assertion, an error."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
    return False


# -- what may live -----------------------------------------------------------------------------------------------------


@dataclass
class Explained:
    """Mutants that may live, and why: `where` and `change` are as a mutant is printed, with `*` for anything."""

    where: str
    change: str
    why: str

    def covers(self, mutant: Mutant) -> bool:
        """Tell whether a mutant is one of these."""
        statement, change = f"{mutant.path} {mutant.where}", f"{mutant.was} -> {mutant.becomes}"
        return _matches(self.where, statement) and _matches(self.change, change)


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None


def explanations(file: Path) -> list[Explained]:
    """Read which mutants may live."""
    return [Explained(**entry) for entry in tomllib.loads(file.read_text()).get("survivor", [])]


# -- the tests of a mutant ---------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What running tests came to: seconds of each that passed, and those that run a statement."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run what a mutant changes, the shortest first, as many as there is time for."""
        chosen: list[str] = []
        left = ENOUGH
        asked = self.tests[mutant.statement] & self.seconds.keys()
        for test in sorted(asked, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


@dataclass
class Tree:
    """A copy of the project, in which nothing but this works."""

    path: Path
    top: Path = TOP
    _writes: int = 0

    def __post_init__(self) -> None:
        shutil.copytree(self.top, self.path, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)

    def write(self, path: str, source: bytes) -> None:
        """Change a module; its time is one that no compiled form of it has."""
        self._writes += 1
        (self.path / path).write_bytes(source)
        os.utime(self.path / path, (self._writes, self._writes))

    def restore(self, path: str) -> None:
        """Give a module its own source again."""
        self.write(path, (self.top / path).read_bytes())

    def run(
        self, files: Iterable[str], *arguments: str, settings: Mapping[str, Path], limit: float | None = None
    ) -> int | None:
        """Run tests in the tree; return pytest's exit code, None where they took longer than the limit.

        Args:
            files: the files of tests.
            arguments: of pytest.
            settings: of its environment.
            limit: in seconds.
        """
        search = os.pathsep.join([str(self.path), str(self.path / "tests")])
        environment = os.environ | {"PYTHONPATH": search, "DROPQ_EXAMPLES": "100"}
        plugins = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "torture.chosen")
        temporary = f"--basetemp={self.path.parent / f'{self.path.name}-tests'}"
        command = [sys.executable, "-m", "pytest", "-q", *plugins, temporary, *arguments, *sorted(files)]
        with (self.path.parent / f"{self.path.name}.log").open("wb") as log:
            child = subprocess.Popen(
                command, cwd=self.path, env=environment | {key: str(value) for key, value in settings.items()},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                return child.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and what its tests have left behind
                child.wait()

    def log(self) -> str:
        """Return the end of what the last run said."""
        return (self.path.parent / f"{self.path.name}.log").read_text(errors="replace")[-2000:]


def measure(tree: Tree, modules: Sequence[str], kept: Path | None = None) -> Measured:
    """Run each test file once, and find which tests run which statement; what was found before is kept in a file."""
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    shared = sorted(path for part in ("dropq", "tests") for path in tree.path.glob(f"{part}/**/*.py"))
    shared = [path for path in shared if not path.name.startswith("test_")]
    base = hashlib.sha256(b"".join(path.read_bytes() for path in shared)).hexdigest()
    for module in modules:
        tree.write(module, _keeping_account(module, (tree.top / module).read_bytes()))
    measured, new = Measured(), {}
    for file in sorted(tree.path.glob("tests/**/test_*.py")):
        name = str(file.relative_to(tree.path))
        digest = hashlib.sha256(base.encode() + file.read_bytes()).hexdigest()
        found = known.get(name)
        if found is None or found["digest"] != digest:
            print(f"  measuring {name}", file=sys.stderr, flush=True)
            found = {"digest": digest, **_measured(tree, name)}
        new[name] = found
        if kept is not None:
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(known | new))
        measured.seconds |= found["seconds"]
        for statement, tests in found["tests"].items():
            measured.tests[statement].update(tests)
    for module in modules:
        tree.restore(module)
    if not measured.seconds:
        raise NotRun(f"no test passes in a copy of the tree: {tree.log()}")
    return measured


def _measured(tree: Tree, file: str) -> dict[str, object]:
    hits, passed = tree.path / "hits", tree.path / "passed"
    for empty in (hits, passed):
        empty.write_text("")
        empty.chmod(0o666)
    tree.run([file], "-m", LEFT_OUT, settings={HITS: hits, PASSED: passed})
    tests: dict[str, list[str]] = defaultdict(list)
    for line in sorted(set(hits.read_text().splitlines())):
        statement, _, test = line.partition("\t")
        tests[statement].append(test)
    return {"seconds": dict(json.loads(line) for line in passed.read_text().splitlines()), "tests": tests}


def _keeping_account(path: str, source: bytes) -> bytes:
    """Return a module that calls `hit` before each statement of its functions."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        if isinstance(node, _Function):
            # A test that is spared a call by an earlier one's depends on it all the same.
            node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) != "cache"]
            for inside in ast.walk(node):
                _account(path, inside)
    statements = (
        number for number, node in enumerate(tree.body)
        if not isinstance(node, ast.Expr) and getattr(node, "module", "") != "__future__"
    )  # fmt: skip
    after = next(statements, len(tree.body))
    tree.body.insert(after, ast.parse("from torture.hits import hit as _hit_").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


def _account(path: str, node: ast.AST) -> None:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list) or any(hasattr(statement, "counted") for statement in block):
            continue
        counted: list[ast.stmt] = []
        for number, statement in enumerate(block):
            is_docstring = number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_docstring:
                counted += ast.parse(f"_hit_({f'{path}:{statement.lineno}'!r})").body
                counted[-1].counted = True  # type: ignore[attr-defined]
            counted.append(statement)
        setattr(node, name, counted)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What became of the mutants of a run."""

    killed: list[Mutant] = field(default_factory=list)
    explained: list[Mutant] = field(default_factory=list)
    unexplained: list[Mutant] = field(default_factory=list)


def all_mutants(top: Path, modules: Sequence[str]) -> list[Mutant]:
    """List the mutants of some modules of a tree, always in the same order."""
    return [mutant for path in modules for mutant in mutants_of(path, (top / path).read_bytes())]


def modules_of(top: Path, patterns: Iterable[str] = MODULES) -> list[str]:
    """Return the modules that patterns name."""
    return sorted({str(path.relative_to(top)) for pattern in patterns for path in top.glob(pattern)})


def sampled(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Choose some mutants by chance; a seed always chooses the same."""
    if count is None or count >= len(mutants):
        return mutants
    return [mutants[index] for index in sorted(random.Random(seed).sample(range(len(mutants)), count))]


def hunt(mutants: Sequence[Mutant], trees: Sequence[Tree], measured: Measured, may_live: list[Explained]) -> Report:
    """Run mutants against their tests, as many at once as there are trees."""
    _control(trees[0], mutants, measured)
    report, free = Report(), SimpleQueue[Tree]()
    for tree in trees:
        free.put(tree)

    def tried(mutant: Mutant) -> bool:
        tree = free.get()
        try:
            return is_killed(mutant, tree, measured)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for mutant, killed in zip(mutants, pool.map(tried, mutants), strict=True):
            explained = not killed and any(entry.covers(mutant) for entry in may_live)
            word, kind = (
                ("killed", report.killed) if killed
                else ("explained", report.explained) if explained
                else ("LIVES", report.unexplained)
            )  # fmt: skip
            kind.append(mutant)
            print(f"  {word}: {mutant}", file=sys.stderr, flush=True)
    return report


def _control(tree: Tree, mutants: Sequence[Mutant], measured: Measured) -> None:
    """See that tests that are run like this pass while nothing is changed: else each mutant would count as killed."""
    tests = [test for mutant in mutants for test in measured.of(mutant)[:5]]
    if tests and (code := _asked(tree, tests, measured)) != 0:
        raise NotRun(f"tests end with {code} although nothing was changed: {tree.log()}")


def is_killed(mutant: Mutant, tree: Tree, measured: Measured) -> bool:
    """Tell whether a test fails, or hangs, by a mutant; one that no test runs lives."""
    tests = measured.of(mutant)
    if not tests:
        return False
    tree.write(mutant.path, mutant.of((tree.top / mutant.path).read_bytes()))
    try:
        return _asked(tree, tests, measured) != 0
    finally:
        tree.restore(mutant.path)


def _asked(tree: Tree, tests: Sequence[str], measured: Measured) -> int | None:
    """Ask tests until one fails; return pytest's exit code, None where they hang."""
    chosen = tree.path / "chosen.json"
    chosen.write_text(json.dumps(tests))
    seconds = [measured.seconds[test] for test in tests]
    hangs = f"--timeout={HANGS + 3 * max(seconds):.0f}"
    files = {test.partition("::")[0] for test in tests}
    limit = BEGINS + HANGS + 3 * sum(seconds)
    return tree.run(files, "-x", hangs, "-m", LEFT_OUT, settings={CHOSEN: chosen}, limit=limit)


def main() -> int:
    """Hunt all mutants, or some."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="MODULES", default=",".join(MODULES), help="patterns of paths, with commas")
    parser.add_argument("--where", metavar="NAME", default="", help="only in functions whose name has this in it")
    parser.add_argument("--sample", type=int, metavar="N", help="so many, by chance; else all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run none")
    parser.add_argument("--folder", type=Path, help="where to put copies of the tree")
    asked = parser.parse_args()
    modules, began, may_live = modules_of(TOP), time.monotonic(), explanations(SURVIVORS)
    everywhere = all_mutants(TOP, modules)
    wanted = set(modules_of(TOP, asked.only.split(",")))
    among = [mutant for mutant in everywhere if mutant.path in wanted and asked.where in mutant.where]
    mutants = sampled(among, asked.sample, asked.seed)
    if asked.list:
        print(*mutants, f"{len(mutants)} mutants", sep="\n")
        return 0
    stale = [entry for entry in may_live if not any(entry.covers(mutant) for mutant in everywhere)]
    with tempfile.TemporaryDirectory(prefix="mutants-", dir=asked.folder) as folder:
        trees = [Tree(Path(folder) / f"tree{number}") for number in range(asked.jobs)]
        report = hunt(mutants, trees, measure(trees[0], modules, KEPT), may_live)
    for entry in stale:
        print(f"{SURVIVORS.name} explains what is no mutant any more: {entry.where}: {entry.change}")
    for mutant in report.unexplained:
        print(f"LIVES  {mutant}")
    figures = Counter(killed=len(report.killed), explained=len(report.explained), unexplained=len(report.unexplained))
    summary = ", ".join(f"{count} {kind}" for kind, count in figures.items())
    print(f"{len(mutants)} mutants of {len(everywhere)}: {summary}; {time.monotonic() - began:.0f} s")
    return 1 if report.unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
