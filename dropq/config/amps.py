"""Reads the queues of an AMPS configuration, which is XML, as what their queue.toml files say.

Invariant: what AMPS's file says of a queue is taken over, or left out with a reason, or an error. No other file is read
and no DTD, so there are no entities that name files or grow without end. This module writes no files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from errno import ENOENT
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from dropq.config.load import QUEUE_KEYS, content_of, snake, validate_options
from dropq.config.schema import RootConfig
from dropq.errors import ConfigError, InvalidName, StorageError
from dropq.format.names import check_queue_name
from dropq.hints import nearest

#: The elements that define queues, each with the replication_type of its queue.
_QUEUES = {name: name for name in ("Queue", "LocalQueue", "GroupLocalQueue")} | {"QueueDefinition": "Queue"}
_NAMES, _NO_NAME = ("Name", "Topic"), "?"
_VARIABLE = re.compile(r"\$\{([^{}]*)\}")
_KIND = "ReplicationType"


class AmpsQueue(NamedTuple):
    """A queue of an AMPS configuration: its options in AMPS's spelling, and why each other key is left out."""

    name: str
    options: Mapping[str, str]
    left_out: Mapping[str, str]

    @property
    def is_shared(self) -> bool:
        """Whether several roots may share it."""
        return _KIND in self.options


def read_queues(path: str, root: RootConfig, root_file: str) -> list[AmpsQueue]:
    """Read the queues that an AMPS configuration defines, in their order.

    Args:
        root, root_file: the configuration of the root that the queues are for, and its file.

    Raises:
        ConfigError: the file cannot be used, or one of its queues; the error lists all problems.
        StorageError: there is no such file.
    """
    data = content_of(path)
    if data is None:
        raise StorageError(f"there is no file {path}", path=path, errno=ENOENT)
    document = _parsed(data, path)
    if document.tag != "AMPSConfig":
        raise ConfigError(
            f"{path}: the file begins with <{document.tag}>, and a configuration of AMPS with <AMPSConfig>"
        )
    sections = document.findall("SOW")
    elements = [element for section in sections for element in section if element.tag in _QUEUES]
    problems = [
        f"{path}: line {include.attrib['line']}: <Include> is not followed: `ampServer --dump-config` writes the "
        "configuration as one file"
        for element in (document, *sections, *elements)
        for include in element.findall("Include")
    ]
    found = list[AmpsQueue]()
    for element in elements:
        where = f"{path}: line {element.attrib['line']}"
        queue, more = _queue(element, where)
        if queue.name in {other.name for other in found} - {_NO_NAME}:
            more.append(f"{where}: there are two queues {queue.name}: give each a name of its own")
        if not more:
            try:
                validate_options(queue.options, where, root=root, root_file=root_file, queue=queue.name)
            except ConfigError as error:
                more.append(str(error))
        found.append(queue)
        problems += more
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _parsed(data: bytes, path: str) -> Element:
    """Return the outermost element; each element has the line that it begins in as its only attribute."""
    builder, parser = TreeBuilder(), expat.ParserCreate()

    def refuse(*_: object) -> None:
        raise ConfigError(
            f"{path}: line {parser.CurrentLineNumber}: a DOCTYPE is not allowed, as its entities may name any file: "
            "`ampServer --dump-config` writes the configuration without"
        )

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = lambda tag, _: builder.start(tag, {"line": str(parser.CurrentLineNumber)})
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the latter for an encoding that is none
        raise ConfigError(f"{path}: this is not valid XML ({error})") from error
    return builder.close()


def _queue(element: Element, where: str) -> tuple[AmpsQueue, list[str]]:
    """Return the queue that an element defines, and the problems; without a name it is called `_NO_NAME`."""
    texts, problems = dict[str, str](), list[str]()
    for child in element:
        at = f"{where}: {child.tag}"
        if child.tag == "Include":
            continue  # it is a problem already
        if len(child):
            problems.append(f"{at}: a text is allowed, without elements in it")
        elif child.tag in texts:
            problems.append(f"{at}: it is there twice: give it once")
        else:
            texts[child.tag] = _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), child.text or "").strip()
            problems += [
                f"{at}: there is no variable {name} in the environment: set it"
                for name in _VARIABLE.findall(child.text or "")
                if name not in os.environ
            ]
    names = [texts.pop(key) for key in _NAMES if key in texts]
    name = names[0] if names else _NO_NAME
    if len(names) != 1:
        problems.append(f"{where}: give the queue one Name")
    try:
        check_queue_name(name)
    except InvalidName as error:
        problems.append(f"{where}: Name: {error}")
    left_out = {key: why for key in texts if (why := _left_out(key, texts, name))}
    options = {key: value for key, value in texts.items() if key not in left_out}
    if (kind := _QUEUES[element.tag]) != "LocalQueue":
        options[_KIND] = kind
    return AmpsQueue(name, options, left_out), problems


def _left_out(key: str, texts: Mapping[str, str], name: str) -> str:
    """Return why a key is left out; "" if it is taken over."""
    if snake(key) not in QUEUE_KEYS:
        near = nearest(key, QUEUE_KEYS)
        return f"dropq has no such key{f'; the nearest is {near[0]}' if near else ''}"
    if key in ("UnderlyingTopic", "DefaultPublishTarget") and texts.get("UnderlyingTopic", name) == texts[key] == name:
        return "it is the queue's own name, as it is by default"
    return ""
