"""Reads the files of selectors, `selectors/NAME.toml`: what each says, and what is wrong with it.

Invariant: a file that has a problem is no selector. All problems of a file are reported together, each with the file,
the key and what is allowed. This module writes no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from dropq.config.load import short_toml, toml_value
from dropq.config.schema import check_expression
from dropq.errors import ConfigError, InvalidName
from dropq.format.addresses import check_address
from dropq.format.credits import is_token
from dropq.format.names import TEMPORARY
from dropq.hints import nearest
from dropq.storage.reading import parse_toml

Operation = Literal["move", "copy", "bounce"]
Role = Literal["normal", "default", "overflow"]
Choice = TypeVar("Choice", bound=str)

#: How the file of a selector ends.
SUFFIX = ".toml"
#: What a selector does with a message that it takes.
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
#: When a selector is asked: with the others; if no other matches; or by senders, while the queue is full.
ROLES: tuple[Role, ...] = get_args(Role)
_KEYS = ("to", "op", "filter", "credit", "role", "token")
#: The default return addresses of a bounce: the temporary queues of requesters that wait for a reply.
TO_REQUESTERS = (f"{TEMPORARY}*",)
#: The most credits of a selector.
_MOST = 1_000_000
_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
#: What is wrong in a file: each key with what is wrong with it.
_Problems = list[tuple[str, str]]
_TOKEN_LINE = re.compile(r"^[ \t]*token[ \t]*=.*$", re.MULTILINE)
_TOKEN = re.compile(rb"""^[ \t]*token[ \t]*=[ \t]*["']([0-9a-z]{6})["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A selector, as its file says.

    Attributes:
        op: what it does.
        to: the address that it sends to; None for a bounce, which goes to each message's return address.
        returns_to: which return addresses a bounce goes to; a `*` at the end of one stands for the rest of a name.
        filter: which messages it takes; None for all.
        credit: how many messages that it moved may be unsettled at a time; None where it spends no credits.
        role: when it is asked.
        token: what its credits are known by; "" if it has none yet.
    """

    name: str
    op: Operation = "move"
    to: str | None = None
    returns_to: tuple[str, ...] = ()
    filter: str | None = None
    credit: int | None = None
    role: Role = "normal"
    token: str = ""


def may_return_to(selector: Selector, address: str) -> bool:
    """Return whether a bounce goes to a return address, which the message's sender chose."""
    return any(
        address == one or (one[-1:] == "*" and address.startswith(one[:-1]) and "/" not in address[len(one) - 1 :])
        for one in selector.returns_to
    )


def check_name(name: str) -> None:
    """Raise InvalidName if a selector cannot have a name."""
    if not _NAME.fullmatch(name):
        raise InvalidName(f"{name!r} cannot name a selector: give 1 to 64 letters, digits, - and _")


def name_of(file: str) -> str | None:
    """Return the selector that a file is of, by the file's name; None for any other file."""
    name = file.removesuffix(SUFFIX)
    return name if name != file and _NAME.fullmatch(name) else None


def parse(name: str, content: bytes, where: str, *, queue: str) -> Selector:
    """Read the file of a queue's selector, or raise ConfigError with all of its problems; it calls the file `where`."""
    try:
        table = parse_toml(content.decode())
    except ValueError as error:
        raise ConfigError(f"{where}: this is no TOML ({error}); the selector takes nothing until it is") from error
    return check(name, table, where, queue=queue)


def check(name: str, table: Mapping[str, object], where: str, *, queue: str) -> Selector:
    """Return the selector that some options describe; arguments and errors as of `parse`."""
    problems: _Problems = []
    for key in table.keys() - set(_KEYS):
        near = nearest(key, _KEYS)
        problems.append(
            (key, f"there is no such key; {f'is it {near[0]}? ' if near else ''}A selector has {_list(_KEYS)}")
        )
    op = _choice(table, "op", OPERATIONS, problems)
    role = _choice(table, "role", ROLES, problems)
    selector = Selector(
        name=name,
        op=op,
        to=None if op == "bounce" else _to(table, queue, problems),
        returns_to=_returns_to(table, problems) if op == "bounce" else (),
        filter=_filter(table, role, problems),
        credit=_credit(table, op, role, problems),
        role=role,
        token=_token(table, problems),
    )
    if op == "copy" and role != "normal":
        problems.append(("role", f'a copy cannot be the {role} selector, as the message would stay: write op = "move"'))
    if problems:
        raise ConfigError("\n".join(f"{where}: {key}: {what}" for key, what in problems))
    return selector


def text(selector: Selector) -> str:
    """Return the content of a selector's file."""
    to = selector.to if selector.op != "bounce" or selector.returns_to == TO_REQUESTERS else list(selector.returns_to)
    values = {"to": to, "op": selector.op, "filter": selector.filter, "credit": selector.credit}
    values |= {"role": selector.role, "token": selector.token or None}
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items() if value is not None)


def token_in(content: bytes) -> str:
    """Return the token in a selector's file, also in a file that cannot be used; "" if it has none."""
    try:
        token = parse_toml(content.decode()).get("token")
    except ValueError:  # no TOML: the line that looks so
        found = _TOKEN.search(content)
        return "" if found is None else found[1].decode()
    return token if isinstance(token, str) and is_token(token) else ""


def with_token(content: str, selector: Selector) -> str:
    """Return the content of a selector's file with the selector's token; where one line will do, the rest stays."""
    line = f'token = "{selector.token}"'
    wanted = parse_toml(content) | {"token": selector.token}
    for edited in (_TOKEN_LINE.sub(line, content, count=1), f"{line}\n{content}"):
        with suppress(ValueError):  # the line was no key, but part of a string, or the key is there in quotes
            if parse_toml(edited) == wanted:
                return edited
    return text(selector)


def _choice(table: Mapping[str, object], key: str, choices: tuple[Choice, ...], problems: _Problems) -> Choice:
    value = table.get(key, choices[0])
    if value not in choices:
        problems.append((key, f"{short_toml(value)} is none of {_list(choices)}"))
    return next((choice for choice in choices if choice == value), choices[0])


def _check_to(address: str, problems: _Problems) -> None:
    try:
        check_address(address)
    except InvalidName as error:
        problems.append(("to", str(error)))


def _to(table: Mapping[str, object], queue: str, problems: _Problems) -> str | None:
    value = table.get("to")
    if not isinstance(value, str):
        problems.append(("to", "give the address of the queue or topic that messages go to, as a string"))
        return None
    _check_to(value, problems)
    if value == queue:
        problems.append(("to", f"{value} is the selector's own queue: messages would never leave it"))
    return value


def _returns_to(table: Mapping[str, object], problems: _Problems) -> tuple[str, ...]:
    value = table.get("to", TO_REQUESTERS)
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, str) for each in found):
        problems.append(("to", "give the return addresses that a bounce goes to, as a string or a list of strings"))
        return ()
    for each in found:
        if "*" in each[:-1]:
            problems.append(("to", f"{each!r}: a * stands for the rest of a name, at its end"))
        elif each[-1:] != "*":
            _check_to(each, problems)
    return tuple(found)


def _filter(table: Mapping[str, object], role: str, problems: _Problems) -> str | None:
    value = table.get("filter")
    if value is None:
        return None
    if not isinstance(value, str):
        problems.append(("filter", "give an expression as a string"))
        return None
    if role != "normal":
        problems.append(("filter", f"the {role} selector takes what others do not: it has no filter"))
    try:
        check_expression(value)
    except ValueError as error:
        problems.append(("filter", str(error)))
    return value


def _credit(table: Mapping[str, object], op: str, role: str, problems: _Problems) -> int | None:
    value = table.get("credit")
    if op != "move" or role == "overflow":
        if value is not None:
            who = "the overflow selector" if role == "overflow" else f"a {op}"
            problems.append(("credit", f"{who} spends no credits: leave it out"))
        return None
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        problems.append(("credit", f"{short_toml(value)} is no number from 1 to {_MOST}"))
        return 1
    return value


def _token(table: Mapping[str, object], problems: _Problems) -> str:
    value = table.get("token", "")
    if value == "" or is_token(value):
        return str(value)
    problems.append(
        ("token", f"{short_toml(value)} is no token, 6 of a to z and 0 to 9: leave it out, and a router gives it one")
    )
    return ""


def _list(values: tuple[str, ...]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"
