"""The hunt for mutants, held against a small project of which is known what its tests tell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from torture import mutants
from torture.mutants import Explained, Measured, Mutant, Tree, explanations, measure, mutants_of
from torture.table import NotRun

SOURCE = b'''\
"""A text may stay."""


def limited(number: int, *, most: int) -> int:
    """Return a number, but no more than so much."""
    log.info("said to %s", "people")
    if number > most:
        return most
    return number


def waits(number: int) -> int:
    while number < 3:
        number += 1
    return number


def unknown() -> int:
    return limited(1, most=1)
'''
TESTS = """\
from dropq.tiny import limited, waits


def test_more_is_cut():
    assert limited(5, most=3) == 3


def test_waits():
    assert waits(1) == 3


def test_that_fails_as_it_is():
    assert limited(1, most=3) == 4
"""


def changes(source: str) -> list[str]:
    found = mutants_of("m.py", f"def f():\n    {source}".encode())
    return [f"{mutant.was} -> {mutant.becomes}" for mutant in found]


@pytest.mark.parametrize(
    ("source", "some"),
    [
        ("return a and not b", ["a and (not b) -> a", "a and (not b) -> not b", "not b -> b"]),
        ("return a <= b", ["a <= b -> a < b", "return a <= b -> return None"]),
        ("call(a)", ["call(a) -> pass"]),
        ("self.at = 0", ["self.at = 0 -> pass", "0 in self.at = 0 -> 1"]),
        ("a = b if c else d", ["b if c else d -> b", "b if c else d -> d"]),
        ("if a: b()", ["if a -> if False", "if a -> if True"]),
        ("a = b(c=True)", ["c=True -> c=False"]),
        ("a = [b for b in c if b]", ["for ... if b -> for ... if True"]),
        ("a = min(b)", ["min(b) -> max(...)"]),
        ("with suppress(KeyError): a()", ["suppress(KeyError) -> suppress()"]),
        ("try: a()\n    except KeyError: return 5", ["except KeyError: return 5 -> raise"]),
        ("return True", ["True in return True -> False"]),
    ],
)
def test_code_is_changed_in_small_ways(source: str, some: list[str]) -> None:
    assert set(some) <= set(changes(source))


@pytest.mark.parametrize(
    "source", ['log.warning("it failed: %d", 1)', "raise ValueError(1)", "assert a < 1", '"a text"', "return 'text'"]
)
def test_what_is_said_to_people_stays(source: str) -> None:
    assert changes(source) == []


@pytest.mark.long
def test_a_change_leaves_a_module_that_can_be_read_and_says_something_else() -> None:
    modules = mutants.modules_of(mutants.TOP)
    assert {"dropq/lifecycle/settlement.py", "dropq/policies/fair_share.py"} <= set(modules)
    listed = mutants.all_mutants(mutants.TOP, modules)
    assert len(listed) > 1000
    assert listed == mutants.all_mutants(mutants.TOP, modules)
    for mutant in mutants.sampled(listed, 200, seed=1):
        source = (mutants.TOP / mutant.path).read_bytes()
        assert ast.dump(ast.parse(mutant.of(source))) != ast.dump(ast.parse(source)), mutant


@pytest.mark.parametrize("pattern", mutants.MODULES)
def test_each_pattern_of_modules_names_a_module(pattern: str) -> None:
    assert mutants.modules_of(mutants.TOP, [pattern]) != []


def test_every_module_keeps_account_also_an_empty_one() -> None:
    for module in mutants.modules_of(mutants.TOP):
        source = (mutants.TOP / module).read_bytes()
        assert ast.parse(mutants._keeping_account(module, source)).body, module
    assert mutants._keeping_account("m.py", b"") == b"from torture.hits import hit as _hit_"


def test_a_seed_chooses_the_same_again_and_another_seed_others() -> None:
    listed = mutants_of("m.py", SOURCE)
    assert mutants.sampled(listed, 4, seed=1) == mutants.sampled(listed, 4, seed=1)
    assert len({tuple(mutants.sampled(listed, 4, seed=seed)) for seed in range(5)}) > 1
    assert mutants.sampled(listed, None, seed=1) == mutants.sampled(listed, 10**6, seed=1) == listed


def test_each_that_is_explained_is_a_mutant_of_the_code_and_says_why_it_may_live() -> None:
    listed = mutants.all_mutants(mutants.TOP, mutants.modules_of(mutants.TOP))
    for entry in explanations(mutants.SURVIVORS):
        assert any(entry.covers(mutant) for mutant in listed), f"{entry} is no mutant any more"
        assert len(entry.why.split()) > 4, entry


@pytest.mark.parametrize(
    ("where", "change", "covered"),
    [
        ("m.py limited", "number > most -> number >= most", True),
        ("m.py *", "*most -> *", True),
        ("m.py waits", "number > most -> number >= most", False),
        ("m.py limited", "number > most", False),
    ],
)
def test_an_explanation_covers_what_it_names(where: str, change: str, covered: bool) -> None:
    (mutant,) = [one for one in mutants_of("m.py", SOURCE) if one.becomes == "number >= most"]
    assert Explained(where, change, "why").covers(mutant) is covered


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, Measured, Path]:
    """A project with one module, and what its tests run."""
    top = tmp_path_factory.mktemp("project")
    (top / "dropq").mkdir()
    (top / "dropq" / "__init__.py").touch()
    (top / "dropq" / "tiny.py").write_bytes(b"import logging\n\nlog = logging.getLogger()\n\n\n" + SOURCE)
    (top / "tests" / "torture").mkdir(parents=True)
    (top / "tests" / "test_tiny.py").write_text(TESTS)
    for name in ("__init__.py", "hits.py", "chosen.py"):
        (top / "tests" / "torture" / name).write_bytes((Path(mutants.__file__).parent / name).read_bytes())
    (top / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    spark:\n    cluster:\n")
    tree = Tree(tmp_path_factory.mktemp("copies") / "tree", top)
    return tree, measure(tree, ["dropq/tiny.py"], top / "kept" / "measured.json"), top


def the(tree: Tree, where: str, change: str) -> Mutant:
    listed = mutants.all_mutants(tree.top, ["dropq/tiny.py"])
    (found,) = [one for one in listed if (one.where, f"{one.was} -> {one.becomes}") == (where, change)]
    return found


def test_a_test_belongs_to_the_statements_that_it_runs_if_it_passes(tiny: tuple[Tree, Measured, Path]) -> None:
    tree, measured, _ = tiny
    assert measured.of(the(tree, "limited", "return most -> return None")) == ["tests/test_tiny.py::test_more_is_cut"]
    assert measured.of(the(tree, "limited", "return number -> return None")) == []
    assert measured.of(the(tree, "waits", "return number -> return None")) == ["tests/test_tiny.py::test_waits"]


def test_what_was_measured_is_kept_until_a_file_changes(
    tiny: tuple[Tree, Measured, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, measured, top = tiny
    monkeypatch.setattr(mutants, "_measured", lambda tree, file: pytest.fail("it is measured again"))
    kept = top / "kept" / "measured.json"
    assert measure(tree, ["dropq/tiny.py"], kept).seconds == measured.seconds
    other = Tree(tmp_path / "other", top)
    (other.path / "tests" / "test_tiny.py").write_text(TESTS + "\n")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measure(other, ["dropq/tiny.py"], kept)


def test_a_mutant_is_killed_by_a_test_that_fails_or_hangs_and_else_is_explained_or_told(
    tiny: tuple[Tree, Measured, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "HANGS", 1.0)
    tree, measured, _ = tiny
    fails = the(tree, "limited", "return most -> return None")
    hangs = the(tree, "waits", "number += 1 -> pass")
    same = the(tree, "limited", "number > most -> number >= most")
    unseen = the(tree, "unknown", "return limited(1, most=1) -> return None")
    may_live = [Explained("*.py limited", "* -> number >= most", "at the limit both are the same")]
    report = mutants.hunt([fails, hangs, same, unseen], [tree], measured, may_live)
    assert (report.killed, report.explained, report.unexplained) == ([fails, hangs], [same], [unseen])
    assert (tree.path / "dropq" / "tiny.py").read_bytes() == (tree.top / "dropq" / "tiny.py").read_bytes()
    assert f"LIVES: {unseen}" in capsys.readouterr().err


def test_nothing_counts_as_killed_where_tests_fail_of_themselves(tiny: tuple[Tree, Measured, Path]) -> None:
    tree = tiny[0]
    mutant = the(tree, "limited", "return most -> return None")
    failing = "tests/test_tiny.py::test_that_fails_as_it_is"
    with pytest.raises(NotRun, match="although nothing was changed"):
        mutants.hunt([mutant], [tree], Measured({failing: 1.0}, {mutant.statement: {failing}}), [])
