"""Write the reference at the end of docs/python.md: `python docs/python_reference.py`, from signatures and docstrings.

It stands between two markers; what is before them is written by hand. Of each docstring it has the first paragraph,
unless that is of an error or a verb that a table of the paper has, or says no more than the same verb for threads.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef

import dropq
from dropq import aio, testing

PAPER = Path(__file__).parent / "python.md"
BEGIN = "<!-- The reference begins: docs/python_reference.py writes it. -->"
END = "<!-- The reference ends. -->"

#: What the reference says of itself.
TYPES = "Calls are shown with their defaults; `help` and editors show the types of arguments, and whole docstrings."
#: The classes whose attributes are listed, each with its own heading.
WITH_ATTRIBUTES = (
    *(dropq.Root, dropq.Queue, dropq.Topic, dropq.Subscription, dropq.Message),
    *(dropq.Record, dropq.RecordWriter),
)
#: The classes that users make objects of.
MADE_BY_USERS = (dropq.Root, dropq.Queue, aio.Queue)
#: How what a class does in a loop is written.
LOOPS = {"__iter__": "for message in subscription", "__aiter__": "async for message in subscription"}
#: The verbs of messages and records that a table of the paper describes.
SETTLING = {"ack", "expire", "extend", "fail", "nack", "reject", "release"}
#: What these classes have for dropq's own modules.
FOR_DROPQ = {"context", "layout", "config"}


class _Bare:
    """An annotation that is written without quotes."""

    def __init__(self, annotation: object) -> None:
        self._text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation

    def __repr__(self) -> str:
        return self._text if isinstance(self._text, str) else inspect.formatannotation(self._text)


def signature(thing: Any, *, method: bool = False) -> str:
    """Return the arguments of a function or class, and what it returns; without `self` or `cls`.

    A call is written with its defaults, what a caller only reads with the types of its fields.
    """
    found = inspect.signature(thing)
    parameters = list(found.parameters.values())[1 if method else 0 :]
    returns = found.return_annotation
    if inspect.isclass(thing) or returns in (found.empty, None, "None"):
        returns = found.empty
    if is_read(thing):
        shown = [each.replace(annotation=_Bare(each.annotation), default=each.empty) for each in parameters]
        return str(found.replace(parameters=shown, return_annotation=found.empty))
    shown = [each.replace(annotation=each.empty) for each in parameters]
    return str(found.replace(parameters=shown, return_annotation=returns if returns is found.empty else _Bare(returns)))


def is_error(thing: Any) -> bool:
    """Return whether a thing is an error that dropq raises, which the paper has in a table."""
    return inspect.isclass(thing) and issubclass(thing, dropq.DropqError)


def is_read(thing: Any) -> bool:
    """Return whether a thing is a class whose objects dropq makes, with fields for callers to read."""
    return inspect.isclass(thing) and (dataclasses.is_dataclass(thing) or issubclass(thing, tuple))


def said(thing: Any) -> str:
    """Return the first paragraph of a docstring, as one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def filled(text: str, *, item: bool = False) -> str:
    """Break a text into lines."""
    return textwrap.fill(
        text, 120, subsequent_indent="  " if item else "", break_long_words=False, break_on_hyphens=False
    )


def in_brief(name: str) -> str:
    """Return the line of a public name that has no attributes of interest."""
    thing = getattr(dropq, name)
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return f"- `{name}`: {' | '.join(kind.__name__ for kind in thing.__args__)}"
    plain = inspect.isclass(thing) and thing.__init__ in (Exception.__init__, object.__init__)
    takes = "" if plain and not issubclass(thing, tuple) else signature(thing)
    return f"- `{name}{takes}`: {said(thing)}"


def kept(kind: type) -> list[str]:
    """Return the public attributes that a class sets when an object is made."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return sorted(name for name in names if not name.startswith("_") and name not in FOR_DROPQ)


def is_repeated(kind: type, name: str, value: Any) -> bool:
    """Return whether a verb of asyncio says no more than the verb of the same class and name for threads."""
    plain = getattr(getattr(dropq, kind.__name__, None), name, None) if kind.__module__ == aio.__name__ else None
    return plain is not None and (
        said(value) == said(plain) or f"as `dropq.{kind.__name__}.{name}` does" in said(value)
    )


def attributes(kind: type) -> Iterator[str]:
    """Yield a line for each public method and property of a class."""
    same: list[str] = []
    awaited: list[str] = []
    settling: list[str] = []
    for name, value in inspect.getmembers_static(kind):
        plain = getattr(value, "__func__", value)
        if name in LOOPS:
            yield f"- `{LOOPS[name]}`: {said(plain)}"
        elif name.startswith("_") or name in FOR_DROPQ:
            continue
        elif name in SETTLING and kind in (dropq.Message, dropq.Record):
            settling.append(f"`{name}{signature(plain, method=True)}`")
        elif inspect.iscoroutinefunction(plain) and is_repeated(kind, name, plain):
            awaited.append(f"`{name}`")
        elif isinstance(value, property):
            yield f"- `{name}: {_Bare(inspect.signature(value.fget).return_annotation)}`: {said(value)}"  # type: ignore[arg-type]
        elif inspect.isfunction(plain):
            word = "async for " if inspect.isasyncgenfunction(plain) else ""
            word = "await " if inspect.iscoroutinefunction(plain) else word
            yield f"- `{word}{name}{signature(plain, method=True)}`: {said(plain)}"
        elif hasattr(value, "of"):
            same.append(f"`{name}`")
    if settling:
        yield f"- As [above](#receive-and-settle): {', '.join(settling)}"
    if awaited:
        yield f"- Awaited, as of `dropq.{kind.__name__}`: {', '.join(awaited)}"
    if same:
        yield f"- As of `dropq.Message`: {', '.join(same)}"
    if own := [f"`{name}`" for name in kept(kind)]:
        yield f"- Attributes: {', '.join(own)}"


def described(kind: type, name: str) -> Iterator[str]:
    """Yield the part of a class that lists its attributes."""
    yield f"### {name}\n"
    takes = signature(kind) if kind in MADE_BY_USERS else ""
    yield filled(f"`{kind.__name__}{takes}`: {said(kind)}") + "\n"
    for line in attributes(kind):
        yield filled(line, item=True)
    yield ""


def reference() -> str:
    """Return the whole reference."""
    lines = ["## Reference\n", filled(TYPES) + "\n"]
    for kind in WITH_ATTRIBUTES:
        lines += described(kind, f"dropq.{kind.__name__}")
    errors = [name for name in dropq.__all__ if is_error(getattr(dropq, name))]
    others = [name for name in dropq.__all__ if getattr(dropq, name) not in WITH_ATTRIBUTES and name not in errors]
    lines += ["### Other names of dropq\n", *(filled(in_brief(name), item=True) for name in others)]
    lines += [filled(f"- [Errors](#errors): {', '.join(f'`{name}`' for name in errors)}", item=True), ""]
    for name in aio.__all__:
        lines += described(getattr(aio, name), f"dropq.aio.{name}")
    lines += ["### dropq.testing\n"]
    lines += [filled(f"- `{name}`: {said(getattr(testing, name).__wrapped__)}", item=True) for name in testing.__all__]
    return "\n".join(lines)


def with_reference(paper: str) -> str:
    """Return the paper with its reference as it has to be."""
    head, _, rest = paper.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{reference()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAPER.write_text(with_reference(PAPER.read_text()))
