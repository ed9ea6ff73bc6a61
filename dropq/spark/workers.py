"""Spark's worker processes, which dropq shares with the code of its users."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_imports() -> None:
    """Let the collector of this process leave alone whatever is alive now, above all the imported modules.

    Spark collects garbage after each task, and the next task waits for it: some 10 ms for the modules of dropq and
    pyarrow, 40 ms with pandas. Garbage that comes later is collected as before. Only what is in a cycle now, and
    becomes garbage later, stays until the process ends. So this is done once in a process, after its imports, and what
    is garbage already is collected first.
    """
    gc.collect()
    gc.freeze()
