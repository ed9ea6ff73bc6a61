"""The format under Spark Connect, where the client has no Java and tasks do not know their query."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import make_queue, where
from test_spark_streams import below
from test_spark_writer import kill_session

#: What pyspark's extra `connect` brings.
NEEDED = ("grpc", "grpc_status", "google.rpc", "zstandard", "pandas")


def has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


#: The queues beside the one that is read.
QUEUES = ("out", "epochs", "never", "ours")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.skipif(not all(map(has, NEEDED)), reason="Spark Connect is not installed: pip install 'pyspark[connect]'")
def test_a_client_of_spark_connect_writes_reads_claims_and_streams(tmp_path: Path) -> None:
    queue = make_queue(tmp_path / "root")
    out, epochs, never, ours = (queue.root.create_queue(name, durability="none") for name in QUEUES)
    script, log = Path(__file__).with_name("connect_driver.py"), tmp_path / "driver.log"
    with log.open("wb") as errors:
        driver = subprocess.Popen(
            [sys.executable, str(script), str(queue.root.path), str(tmp_path / "nightly")],
            stdout=subprocess.PIPE, stderr=errors, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = driver.communicate()
        finally:
            kill_session(driver.pid)
    assert driver.returncode == 0, log.read_text()
    found = json.loads(output.splitlines()[-1])
    assert found["session"].startswith("pyspark.sql.connect")
    assert found["read"] == list("01234")
    assert len(found["claimed"]) == 2 and found["job"] == ""
    assert where(ours) == {"target": [body.encode() for body in found["claimed"]]}
    streamed = sorted(set("01234") - {*found["claimed"]})
    assert where(queue) == {"processed": [body.encode() for body in "01234"]}
    assert where(out) == {"target": [body.encode() for body in streamed]}
    assert below(out, ".dropq", "ledger") == ["nightly-0.json"]
    assert found["backlog"][-1] == 0
    assert len(where(epochs)["target"]) == 2
    assert "not under Spark Connect; nothing was sent" in found["refused"]
    assert (where(never), below(never, "working")) == ({}, [])
