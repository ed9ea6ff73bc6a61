"""Spark reads beside consumers; its jobs and streams are killed in every phase, as `make torture-spark` does it."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec

from dropq import Unavailable
from torture.table import NotRun, Options, Row

#: Kills in each phase, in the long form and in the short one.
PROVEN = {True: 10, False: 1}


def run(options: Options) -> Iterable[Row]:
    """Read beside consumers, then kill until each phase had so many kills; a row for each direction."""
    if find_spec("pyspark") is None:
        raise NotRun("no PySpark: pip install 'dropq[spark,jre]'")
    from dropq.spark import find_java
    from torture.spark_reads import rows as reads

    yield from reads(options)
    from torture.spark_kills import Torture

    try:
        find_java()
    except Unavailable as error:
        raise NotRun(str(error)) from error
    torture = Torture(options.folder, seed=options.seed, proven=PROVEN[options.long])
    with contextlib.redirect_stdout(sys.stderr):
        torture.run()
    rows: dict[str, Row] = defaultdict(lambda: Row(""))
    for (direction, _), phase in torture.table.items():
        row = rows[direction]
        row.test = f"killed in every phase: {direction}"
        row.kills += phase.kills
        row.lost += phase.lost
        row.doubled += phase.doubled
    for direction, row in rows.items():
        row.cases = torture.jobs(direction)
        row.wrong += [fault for fault in torture.faults if f"direction='{direction}'" in fault]
    first = next(iter(rows.values()))
    first.wrong += [fault for fault in torture.faults if not any(fault in row.wrong for row in rows.values())]
    if torture.lacking:
        first.wrong.append(f"{torture.lacking} kills were not made")
    yield from rows.values()
