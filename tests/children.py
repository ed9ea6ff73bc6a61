"""Runs a function in a forked child: as another process of the same program, or as one that permissions bind."""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import resource
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TypeVar

from forks import DIED, ended, fork, forked
from torture.calls import come_between
from torture.crashes import Dying, Moment

T = TypeVar("T")

#: Seconds after which a child is given up.
PATIENCE = 600
#: The version of the kernel's capability calls that has 64 bits.
_CAPABILITY_VERSION = 0x20080522


def in_child(function: Callable[[], T], *, longest: int = PATIENCE) -> T:
    """Run a function in a forked child; return what it returns, raise what it raises."""
    reading, writing = os.pipe()
    pid = fork(lambda: _answer(function, writing), longest=longest)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    status = ended(pid)
    assert answer, f"the child ended without an answer, with status {status}"
    outcome, value = pickle.loads(answer)
    if outcome == "raised":
        raise value
    return value  # type: ignore[no-any-return]


def killed_at_each_call(build: Callable[[], T], act: Callable[[T], object]) -> Iterator[T]:
    """Let children die before each call of a function that changes something on disk, and in the middle of each write.

    Args:
        build: makes what the function is called with, anew for each child.
        act: the function.

    Yields:
        What was built, once its child is dead; the last child came to its end.
    """

    def run(built: T, at: Moment | None) -> list[str]:
        dying = Dying(at)
        come_between(dying, noreplace=True)
        act(built)
        return dying.calls

    calls = in_child(partial(run, build(), None))
    for number in count():
        is_write = calls[number : number + 1] == ["write"]
        for midway in (False, True) if is_write else (False,):
            built = build()
            status = forked(partial(run, built, Moment(number, midway)))
            assert status in (0, DIED), f"the child ended with {status}"
            yield built
        if status == 0:
            return


def unprivileged(function: Callable[[], T], *, longest: int = PATIENCE) -> T:
    """Run a function in a forked child that permissions bind, also where the tests run as root."""

    def bound() -> T:
        if os.geteuid() == 0:
            drop_capabilities()
        return function()

    return in_child(bound, longest=longest)


def drop_capabilities() -> None:
    """Give up, for good, what lets root pass over permissions: this process stays root, and its files' owner."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def few_descriptors(used: int = 0) -> None:
    """Leave this process few descriptors beside those that it was born with, and some that it uses."""
    for _ in range(used):
        os.open(os.devnull, os.O_RDONLY)
    born_with = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in born_with)
    limit = next(itertools.islice(free, 96, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _answer(function: Callable[[], object], writing: int) -> None:
    try:
        answer = pickle.dumps(("returned", function()))
    except BaseException as error:
        error.add_note("in the child:\n" + traceback.format_exc())
        answer = pickle.dumps(("raised", error))
    with open(writing, "wb") as pipe:
        pipe.write(answer)
