"""Prometheus' own tools judge what dropq writes for it: metrics, alert rules, and the expressions in the paper."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dropq import Root
from dropq.cli.main import main

TOP = Path(__file__).parents[2]
RULES = TOP / "share" / "prometheus"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")


def promtool(*argv: str, input: str = "") -> None:
    """Run promtool, which must find nothing wrong."""
    done = subprocess.run(["promtool", *argv], cwd=RULES, input=input, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr


def test_the_metrics_are_as_prometheus_wants_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Root.create(tmp_path)
    for name in ("q", 'odd "quotes" back\\slash', "umlaut-\u00fc"):
        queue = root.create_queue(name, durability="none")
        queue.send(b"x")
        queue.send(b"x", delay=60)
    assert main(["--root", str(tmp_path), "metrics"]) == 0
    promtool("check", "metrics", input=capsys.readouterr().out)


def test_the_alert_rules_do_what_their_tests_say() -> None:
    promtool("check", "rules", "dropq.rules.yml")
    promtool("test", "rules", "dropq.rules.test.yml")
    named = set(re.findall(r"alert: (\w+)", (RULES / "dropq.rules.yml").read_text()))
    assert named == set(re.findall(r"alertname: (\w+)", (RULES / "dropq.rules.test.yml").read_text()))


def test_the_expressions_of_the_paper_can_be_read(tmp_path: Path) -> None:
    _, _, questions = (TOP / "docs" / "operations.md").read_text().partition("| question | expression |")
    rows = re.findall(r"^\| [^|]+ \| `(.+)` \|$", questions.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) >= 5
    rules = [{"record": f"r{number}", "expr": row.replace("\\|", "|")} for number, row in enumerate(rows)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "paper", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))
