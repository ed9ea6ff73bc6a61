"""Every fork of the tests: a child ends as its work does, whatever happens, and outlives no run.

A child that an exception let go on would be a second pytest, which reports to whom the first one reports.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

#: Seconds after which the kernel ends a child that is still there.
LONGEST = 900
#: What a child ends with if its work raises; and, as tests have it, if it dies in the midst of its work.
FAILED, DIED = 1, 77

#: From prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def heed_signals() -> None:
    """Let signals do what they do by default, also if the parent has this process ignore or block some of them.

    A shell that starts something in the background does so with Ctrl-C, nohup with SIGHUP, and programs that are
    started inherit it. The product keeps ignoring what it was told to ignore; tests send it signals that it is to heed.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(work: Callable[[], object], *, longest: int = LONGEST, out: Path | None = None) -> int:
    """Let a child do some work, and end with 0, or with 1 if it raises; return its id.

    Args:
        work: what the child does; if it calls `os._exit`, the child ends with that status.
        longest: seconds after which the child is ended; 0 stands for no limit, and the child ends with this process.
        out: the file that gets what the child prints.
    """
    if pid := os.fork():
        return pid
    status = FAILED
    try:
        _begin(longest)
        if out is not None:
            fd = os.open(out, os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
        work()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    """Wait for a child; return what it ended with: below 0, the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(work: Callable[[], object]) -> int:
    """Let a child do some work; return what it ended with, see `fork` and `ended`."""
    return ended(fork(work))


def die_after(work: Callable[[], object]) -> None:
    """Let a child do some work, and die before it closes anything."""

    def die() -> None:
        work()
        os._exit(DIED)

    assert forked(die) == DIED


class Process(ForkProcess):
    """A process of multiprocessing's, which forks whatever the Python's default is."""

    def run(self) -> None:
        _begin(LONGEST)
        super().run()


def pool() -> ProcessPoolExecutor:
    """Return processes for work that takes long, as many as there are cores; they end with this process."""
    return ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"), initializer=_begin, initargs=(0,))


def _begin(longest: int) -> None:
    """Be no part of the parent's run: its alarm's handler and its dumps of tracebacks report on its tests."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(longest)
    faulthandler.disable()
    if not longest:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
