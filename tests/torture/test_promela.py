"""The protocol's model: spin finds no way around the promises, and finds one wherever the model is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "model"
TOOLS = ("spin", "gcc")
#: Name, number of states, depth, seconds, verdict.
LINE = re.compile(r"(.+?) +([0-9.e+?]+) states  depth +([0-9?]+) +([0-9.e+?-]+) s  (.+)")

needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason="spin or gcc is missing: apt-get install spin gcc"
)


def check(
    folder: Path, *models: str, environment: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run a folder's check.sh; return how it ended, and the verdict on each model."""
    script = [str(folder / "check.sh"), *models]
    done = subprocess.run(script, capture_output=True, text=True, timeout=900, check=False, env=environment)
    lines = (LINE.fullmatch(line) for line in done.stdout.splitlines())
    return done, {match[1]: match[5] for match in lines if match}


def copy_with(tmp_path: Path, model: str, text: str, other: str) -> Path:
    """Copy the models with a piece of one of them changed."""
    copy = Path(shutil.copytree(MODEL, tmp_path / "model"))
    content = (copy / model).read_text()
    assert text in content
    (copy / model).write_text(content.replace(text, other))
    return copy


@pytest.mark.host
@needs_tools
@pytest.mark.timeout(900)
def test_the_model_holds_and_what_is_broken_on_purpose_does_not() -> None:
    done, verdicts = check(MODEL, environment={**os.environ, "QUICK": "1"})  # `make model` runs the long ones, too
    assert verdicts == {
        "claims": "holds",
        "claims, SHARED_NAMES": "is violated, as it must be",
        "jobs, TWO_SWEEPS": "holds",
        "jobs, LOOK_THEN_DROP": "is violated, as it must be",
        "commit, RENAME_AWAY": "is violated, as it must be",
        "commit, WHOLE_FIRST": "is violated, as it must be",
        "commit, PROCESSING_FIRST": "is violated, as it must be",
        "commit, DROP_HELD": "is violated, as it must be",
        "commit, FENCE_LOOKED_FIRST": "is violated, as it must be",
        "commit, SENT_FIRST": "is violated, as it must be",
        "commit, LOST_SENDS": "is violated, as it must be",
        "credits": "holds",
        "credits, KEY_OF_ID": "is violated, as it must be",
        "credits, NO_LOCK": "is violated, as it must be",
        "credits, CREDITS_FIRST": "is violated, as it must be",
        "credits, RETURN_WITHOUT_LOCK": "is violated, as it must be",
        "credits, BELOW_ANYWHERE": "is violated, as it must be",
        "records, RENAME_AWAY": "is violated, as it must be",
        "records, FROM_MEMORY": "is violated, as it must be",
        "records, WHOLE_FIRST": "is violated, as it must be",
        "records, SYNC_LATE": "is violated, as it must be",
        "records, SYNC_OWN": "is violated, as it must be",
        "records, PROCESSING_FIRST": "is violated, as it must be",
        "records, TORN_LISTING": "is violated, as it must be",
        "reassembly, PARTS_STAY": "is violated, as it must be",
        "reassembly, DRAFT_LATE": "is violated, as it must be",
        "reassembly, LOOK_FIRST": "is violated, as it must be",
        "reassembly, PARTS_LAST": "is violated, as it must be",
        "reassembly, BY_MARK": "is violated, as it must be",
        "reassembly, MARKS_TOO": "is violated, as it must be",
        "roots, FIVE_LISTS": "holds",
        "roots, TWO_MESSAGES": "holds",
        "roots, RESTORED": "holds",
        "roots, RESTORED, PROXIED": "holds",
        "roots, READ_ONCE": "is violated, as it must be",
        "roots, RENAME_THEN_LOOK": "is violated, as it must be",
        "roots, BACK_TOO_SOON": "is violated, as it must be",
        "roots, OLD_NAME": "is violated, as it must be",
        "roots, NEWEST_GOES": "is violated, as it must be",
        "roots, CHECK_LATE": "is violated, as it must be",
        "roots, RECALL_UNCHECKED": "is violated, as it must be",
        "roots, LOOK_ONCE": "is violated, as it must be",
    }, done.stderr
    assert done.returncode == 0


@pytest.mark.host
@needs_tools
@pytest.mark.timeout(300)
def test_a_promise_that_is_not_kept_fails_the_check(tmp_path: Path) -> None:
    copy = copy_with(tmp_path, "claims.pml", "assert(!acked[m]);", "assert(acked[m]);")
    done, verdicts = check(copy, "claims")
    assert done.returncode == 1
    assert verdicts["claims"] == "violated"


@pytest.mark.host
@needs_tools
@pytest.mark.timeout(300)
def test_a_broken_variant_that_holds_fails_the_check(tmp_path: Path) -> None:
    copy = copy_with(tmp_path, "claims.pml", "SHARED_NAMES", "NEVER_DEFINED")
    done, verdicts = check(copy, "claims")
    assert done.returncode == 1
    assert verdicts == {"claims": "holds", "claims, SHARED_NAMES": "holds, but must not"}


@pytest.mark.host
@needs_tools
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("limit", "less", "verdict"),
    [
        ("-m2000000", "-m500", "is not decided: max search depth too small"),
        ("-DMEMLIM=1000", "-DMEMLIM=80", "is not decided: out of memory"),
    ],
)
def test_a_search_that_is_cut_short_fails_the_check(tmp_path: Path, limit: str, less: str, verdict: str) -> None:
    done, verdicts = check(copy_with(tmp_path, "check.sh", limit, less), "claims")
    assert done.returncode == 1
    assert verdicts["claims"] == verdict


def test_without_its_tools_the_check_says_what_to_install(tmp_path: Path) -> None:
    for tool in ("sh", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    done, _ = check(MODEL, environment=os.environ | {"PATH": str(tmp_path)})
    assert done.returncode == 69
    assert "apt-get install spin gcc" in done.stderr
