"""Reads of Spark beside consumers that move messages: each read has the rows of all messages, each once, or fails.

The reads run in this process, by what Spark's driver and its tasks call; the consumers in threads beside it. Nothing is
sent or removed meanwhile, so the judge knows every row.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from helpers import make_queue
from pyspark.sql import types as t

from dropq import DropqError, NoSuchMessage, Queue
from dropq.spark.options import ReadOptions
from dropq.spark.reader import Part, QueueReader
from torture.table import Options, Row

#: Messages, of which each fifth is a file under a foreign name.
MESSAGES = 400
#: Reads of each kind, in the long form and in the short one.
READS = {True: 200, False: 10}
#: Seconds between two moves of a consumer, so that no message goes around while the states are listed.
PACE = 0.002
ALL = "target,processing,processed"
_NUMBER = t.StructType([t.StructField("n", t.LongType())])


def rows(options: Options) -> list[Row]:
    """Read all states, and target/ alone, beside two consumers that acknowledge, return and requeue."""
    queue = make_queue(options.folder / "reads")
    for number in range(MESSAGES):
        body = f'{{"n": {number}}}\n'
        if number % 5:
            queue.send(body)
        else:
            draft = Path(queue.layout.working, f"report {number}.json")
            draft.write_text(body)
            draft.rename(Path(queue.layout.target, draft.name))
    over = threading.Event()
    movers = [threading.Thread(target=_move, args=(queue, over, options.seed + each)) for each in range(2)]
    for mover in movers:
        mover.start()
    try:
        found = [_judged(queue, states, READS[options.long]) for states in (ALL, "target")]
    finally:
        over.set()
        for mover in movers:
            mover.join()
        shutil.rmtree(options.folder / "reads")
    return found


def _move(queue: Queue, over: threading.Event, seed: int) -> None:
    """Take messages, and acknowledge or return them; where none waits, send the acknowledged ones around again."""
    chance = random.Random(seed)
    with queue.root.queue(queue.name).subscribe(max_backlog=None) as subscription:
        while not over.is_set():
            messages = subscription.receive_many(chance.randint(1, 20), 0)
            for message in messages:
                message.ack() if chance.random() < 0.8 else message.release()
                over.wait(PACE)
            if not messages:
                queue.requeue(state="processed")


def _judged(queue: Queue, states: str, count: int) -> Row:
    """Read so often; count rows that a read lacks, or has twice, although it did not fail."""
    row = Row(f"read beside consumers: {states}")
    for _ in range(count):
        reader = QueueReader(
            ReadOptions.parse({
                "root": str(queue.root.path), "queue": queue.name, "state": states, "bodyFormat": "jsonl",
            }),
            _NUMBER,
        )  # fmt: skip
        row.cases += 1
        parts: list[Any] = reader.partitions()
        wanted = Counter(range(MESSAGES)) if states == ALL else None
        time.sleep(PACE * 20)  # some move on before they are read
        try:
            got = Counter(each["n"] for part in parts for batch in reader.read(part) for each in batch.to_pylist())
        except NoSuchMessage:
            row.faults += 1
            continue
        except DropqError as error:
            row.wrong.append(str(error))
            continue
        planned = sum(len(part.files) for part in parts if isinstance(part, Part))
        row.lost += (wanted - got).total() if wanted is not None else max(planned - got.total(), 0)
        row.doubled += sum(times - 1 for times in got.values())
    return row
