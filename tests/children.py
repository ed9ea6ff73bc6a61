"""Runs a function in a forked child: as another process of the same program, or as one that permissions bind."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds after which a child is given up.
PATIENCE = 30
#: The version of the kernel's capability calls that has 64 bits.
_CAPABILITY_VERSION = 0x20080522


def in_child(function: Callable[[], T]) -> T:
    """Run a function in a forked child; return what it returns, raise what it raises."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(function, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert answer, f"the child ended without an answer, with status {status}"
    outcome, value = pickle.loads(answer)
    if outcome == "raised":
        raise value
    return value  # type: ignore[no-any-return]


def unprivileged(function: Callable[[], T]) -> T:
    """Run a function in a forked child that permissions bind, also where the tests run as root."""

    def bound() -> T:
        if os.geteuid() == 0:
            drop_capabilities()
        return function()

    return in_child(bound)


def drop_capabilities() -> None:
    """Give up, for good, what lets root pass over permissions: this process stays root, and its files' owner."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _answer(function: Callable[[], object], writing: int) -> None:
    signal.alarm(PATIENCE)
    try:
        try:
            answer = pickle.dumps(("returned", function()))
        except BaseException as error:
            error.add_note("in the child:\n" + traceback.format_exc())
            answer = pickle.dumps(("raised", error))
        with open(writing, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)
