"""Measure one stage of a pipeline, from queue to queue: what goes out with the ack beside send and ack apart.

In each round all three run one after the other, and what counts are the ratios within a round. *Apart* is dropq's own
send and then ack: a crash between the two loses or doubles a message. The raw loop makes the calls that the stage
needs: claim, read, make a folder, write in working/, rename to the folder, rename the claim there, the message to its
queue and the claim to processed/, remove the folder. Where the durability is `full` it syncs what dropq syncs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import NamedTuple

from beside import RawCalls, emptied, print_rows, synced

import dropq
from bench import scratch

KIB = 1 << 10
STATES = ("working", "target", "processing", "processed", "staged")


class Case(NamedTuple):
    """What is measured: how many workers, how many records a message has, and how many messages a round has."""

    on: str
    durability: str
    workers: int
    records: int
    messages: int

    @property
    def what(self) -> str:
        """What it is called."""
        of = "1 KiB" if self.records == 1 else f"bundles of {self.records} x 1 KiB"
        return f"{of}, {'1 worker' if self.workers == 1 else f'{self.workers} threads'}"

    @property
    def name(self) -> str:
        """What `--only` finds it by."""
        return f"{self.on} {self.durability} {self.what}"


CASES = (
    Case("tmpfs", "none", 1, 1, 1000),
    Case("tmpfs", "full", 1, 1, 1000),
    Case("tmpfs", "none", 8, 1, 1000),
    Case("tmpfs", "none", 1, 100, 100),
    Case("disk", "none", 1, 1, 1000),
    Case("disk", "full", 1, 1, 50),
    Case("disk", "full", 8, 1, 100),
    Case("disk", "full", 1, 100, 20),
)


class Raw(RawCalls):
    """The raw loop of system calls; one thread does it all."""

    def __init__(self, folder: str, case: Case) -> None:
        self._sync = synced if case.durability == "full" else lambda *paths: None
        super().__init__(syncs=False)
        self._homes = [f"{folder}/raw/{name}" for name in ("in", "out")]
        for home in self._homes:
            for state in STATES:
                os.makedirs(f"{home}/{state}")

    def fill(self, count: int, body: bytes) -> None:
        """Let so many messages wait."""
        for number in range(count):
            self.write(f"{self._homes[0]}/target/{number}", body)

    def run(self, count: int) -> None:
        """Move them through the stage."""
        source, to = self._homes
        for file in sorted(os.listdir(f"{source}/target")):
            claim, folder = f"{source}/processing/{file}", f"{source}/staged/{file}"
            os.rename(f"{source}/target/{file}", claim)
            with open(claim, "rb", buffering=0) as claimed:
                body = claimed.read()
            os.mkdir(folder)
            self.write(f"{to}/working/{file}", body)
            os.rename(f"{to}/working/{file}", f"{folder}/part~{file}")
            self._sync(f"{folder}/part~{file}", f"{source}/processing", f"{source}/target", folder, f"{source}/staged")
            os.rename(claim, f"{folder}/whole")
            self._sync(folder, f"{source}/processing", f"{source}/working")
            os.rename(f"{folder}/part~{file}", f"{to}/target/{file}")
            self._sync(f"{to}/target", folder)
            os.rename(f"{folder}/whole", f"{source}/processed/{file}")
            os.rmdir(folder)

    def clear(self, count: int) -> int:
        """Remove what a round left; return how many messages are not where they should be."""
        return sum(
            abs(count - emptied(folder)) for folder in (f"{self._homes[0]}/processed", f"{self._homes[1]}/target")
        )


class Ours:
    """A stage of dropq, which sends with the ack, or apart from it."""

    def __init__(self, folder: str, case: Case, *, apart: bool) -> None:
        root = dropq.Root.create(f"{folder}/{'apart' if apart else 'own'}")
        self._source, self._to = (root.create_queue(name, durability=case.durability) for name in ("in", "out"))
        self._workers, self._apart = case.workers, apart

    def fill(self, count: int, body: bytes) -> None:
        """Let so many messages wait."""
        self._source.send_many([body] * count)

    def run(self, count: int) -> None:
        """Move them through the stage."""
        if self._workers > 1:
            handler = self._sends if self._apart else self._makes
            report = dropq.work(self._source, handler, concurrency=self._workers, until_empty=True)
            assert report.acked == count
            return
        settle = self._settle_apart if self._apart else self._settle
        with self._source.subscribe() as subscription:
            for _ in range(count):
                message = subscription.receive(60)
                assert message is not None
                settle(message)

    def _sends(self, message: dropq.Message) -> None:
        self._to.send(message.body)

    def _makes(self, message: dropq.Message) -> dropq.Out:
        return dropq.Out("out", message.body)

    def _settle_apart(self, message: dropq.Message) -> None:
        self._to.send(message.body)
        message.ack()

    def _settle(self, message: dropq.Message) -> None:
        message.ack(send=dropq.Out("out", message.body))

    def clear(self, count: int) -> int:
        """Remove what a round left; return how many messages are not where they should be."""
        return sum(
            abs(count - emptied(f"{queue.layout.base}/{state}"))
            for queue, state in ((self._source, "processed"), (self._to, "target"))
        )


def row(case: Case, base: str, rounds: int) -> dict[str, object]:
    """Measure a case; return its row."""
    body = b"x" * (KIB - 1) + b"\n"
    body *= case.records
    astray = 0
    with scratch(base) as folder:
        stages: dict[str, Raw | Ours] = {
            "apart": Ours(folder, case, apart=True),
            "dropq": Ours(folder, case, apart=False),
        }
        if case.workers == 1:
            stages["raw"] = Raw(folder, case)
        times = {name: list[float]() for name in stages}
        for number in range(rounds + 1):
            for name, stage in list(stages.items())[:: 1 if number % 2 else -1]:
                count = case.messages if number else 3
                stage.fill(count, body)
                if case.on == "disk":
                    os.sync()  # what those before it wrote is not for it to wait for
                started = time.perf_counter()
                stage.run(count)
                if number:  # what is opened once is opened in the first
                    times[name].append((time.perf_counter() - started) / count / case.records * 1e6)
                astray += stage.clear(count)
    return {
        "what": case.what,
        "on": case.on,
        "durability": case.durability,
        "rounds": rounds,
        "a_round": case.messages,
        **{f"{name}_us": round(statistics.median(each), 1) for name, each in times.items()},
        **ratios(times),
        "astray": astray,
        "load": round(os.getloadavg()[0], 1),
    }


def ratios(times: dict[str, list[float]]) -> dict[str, object]:
    """Return the medians of the ratios within a round: of the stage to the raw loop, and to send and ack apart."""

    def of(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)), 2)

    found: dict[str, object] = {"ratio": of("apart", "dropq")}
    if "raw" in times:
        found |= {"to_raw": of("raw", "dropq"), "raw_to_apart": of("apart", "raw")}
    return found


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, CASES, row))
