"""Write the reference at the end of docs/python.md: `python docs/python_reference.py`, from the public signatures.

It stands between two markers; what is before them is written by hand. It lists names and arguments only: what a name
does is in its docstring, and what an error means is in a table of the paper.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dropq
from dropq import aio, testing

PAPER = Path(__file__).parent / "python.md"
BEGIN = "<!-- The reference begins: docs/python_reference.py writes it. -->"
END = "<!-- The reference ends. -->"

#: What the reference says of itself.
INTRODUCTION = (
    "All public names, and the arguments of calls with their defaults. What each does, returns and raises is in its "
    "docstring, which editors show: `help(dropq.Queue.send)`, or `python -m pydoc dropq.Queue` in a shell."
)
#: The classes whose attributes are listed, each with its own heading.
WITH_ATTRIBUTES = (
    *(dropq.Root, dropq.Queue, dropq.Topic, dropq.Subscription, dropq.Message),
    *(dropq.Record, dropq.RecordWriter),
)
#: The classes that users make objects of.
MADE_BY_USERS = (dropq.Root, dropq.Queue, aio.Queue)
#: What these classes have for dropq's own modules.
FOR_DROPQ = {"context", "layout", "config"}


def arguments(thing: Any, *, method: bool = False) -> str:
    """Return the arguments of a function or class with their defaults, in brackets; without `self` or `cls`."""
    found = inspect.signature(thing)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()][1 if method else 0 :]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def filled(text: str, *, indent: str = "") -> str:
    """Break a text into lines."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def in_brief(name: str) -> str:
    """Return a public name that has no heading, with the fields of what dropq makes, or the arguments of a call."""
    thing = getattr(dropq, name)
    if inspect.isclass(thing) and (dataclasses.is_dataclass(thing) or issubclass(thing, tuple)):
        return f"{name}({', '.join(inspect.signature(thing).parameters)})"
    called = inspect.isfunction(thing) or inspect.isfunction(getattr(thing, "__init__", None))
    return name + arguments(thing) if called else name


def kept(kind: type) -> list[str]:
    """Return the public attributes that a class sets when an object is made."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    ]


def described(kind: type, name: str) -> Iterator[str]:
    """Yield the part of a class: a line for each method, and what it has besides."""
    calls: list[str] = []
    values = set(kept(kind))
    for each, value in inspect.getmembers_static(kind):
        plain = getattr(value, "__func__", value)
        if inspect.isfunction(plain):
            word = "await " if inspect.iscoroutinefunction(plain) else ""
            word = "async for " if inspect.isasyncgenfunction(plain) else word
            calls += [word + each + arguments(plain, method=True)] if not each.startswith("_") else []
        else:
            values.add(each)
    yield f"### {name}\n\n```text"
    if kind in MADE_BY_USERS:
        yield kind.__name__ + arguments(kind)
    yield from (filled(call, indent="    ") for call in calls)
    public = [each for each in sorted(values) if not each.startswith("_") and each not in FOR_DROPQ]
    yield "```\n"
    if public:
        yield filled("Attributes: " + ", ".join(f"`{each}`" for each in public)) + "\n"


def reference() -> str:
    """Return the whole reference."""
    lines = ["## Reference\n", filled(INTRODUCTION) + "\n"]
    for kind in WITH_ATTRIBUTES:
        lines += described(kind, f"dropq.{kind.__name__}")
    for name in aio.__all__:
        lines += described(getattr(aio, name), f"dropq.aio.{name}")
    others = [name for name in dropq.__all__ if getattr(dropq, name) not in WITH_ATTRIBUTES]
    lines += ["### Other names\n\n```text", *(filled(in_brief(name), indent="    ") for name in others)]
    lines += [f"testing.{name}" for name in testing.__all__]
    return "\n".join([*lines, "```"])


def with_reference(paper: str) -> str:
    """Return the paper with its reference as it has to be."""
    head, _, rest = paper.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{reference()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAPER.write_text(with_reference(PAPER.read_text()))
