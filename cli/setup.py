"""Commands that make roots and queues, remove queues, and read their configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dropq.config.load import check_file, explain_queue, toml_text
from dropq.errors import DropqError, InvalidName, NoSuchQueue
from dropq.format.addresses import check_address, layouts, topic_layout
from dropq.format.layout import ROUTES_FILE
from dropq.hints import nearest
from dropq.lifecycle.queue_notes import topics
from dropq.storage.reading import parse_toml

from . import output
from .options import DryRun, QueueName, QueueNames, Settings, Yes, argument, option
from .output import CONFIGURATION, NEGATIVE, OK, Record, escape, unescape
from .parsing import Command, group
from .shell import GlobalOptions, Shell, UsageError, in_states, look_into, report_open, root_above, working_directory

if TYPE_CHECKING:
    from dropq import Queue, Root
    from dropq.config.amps import AmpsQueue
    from dropq.diagnosis.doctor_kinds import Diagnosis

#: The columns of `doctor`.
DIAGNOSIS = ("level", "check", "kind", "path", "found", "means", "advice")


def init(
    ctx: typer.Context,
    directory: Annotated[str | None, argument("DIR", "The directory; made when missing.")] = None,
    dropboxmq: Annotated[
        bool, option("--dropboxmq", "Use the layout of DropboxMQ 1.2, so that it can share the root.")
    ] = False,
) -> None:
    """Make a directory a root of queues; safe to repeat.

    Without DIR it takes the directory of --root or DROPQ_ROOT, else the working directory. Prints the root's path.
    """
    from dropq import Root

    if directory == "":  # as a variable of a script may be
        raise UsageError("DIR is empty: name the directory")
    given = directory or cast(GlobalOptions, ctx.obj).root or os.curdir
    path = os.path.normpath(given if os.path.isabs(given) else os.path.join(working_directory(), given))
    before = root_above(path)
    Root.create(path, dropboxmq=dropboxmq)
    Shell(ctx).line({"root": path}, ("root",))
    if before == path:
        output.note(f"{path} was a root already")
    elif before:
        output.note(f"warning: {path} lies in the root {before}: commands in {path} take the new root")


def create(
    ctx: typer.Context,
    name: QueueName,
    settings: Settings = None,
    dropboxmq: Annotated[
        bool, option("--dropboxmq", "Use the layout of DropboxMQ 1.2: the default where a DropboxMQ shares the root.")
    ] = False,
    flat: Annotated[bool, option("--flat", "Use the layout of dropq alone.")] = False,
) -> None:
    """Make a queue; prints its path.

    VALUE is TOML, such as `10`, `true` or `["*.bak"]`. Anything else is text, so `30s` needs no quotes.
    """
    shell = Shell(ctx)
    if dropboxmq and flat:
        raise UsageError("give --dropboxmq or --flat, but not both")
    if shell.doubt and not shell.root.queues():
        shell.report_no_queues()
    layout = True if dropboxmq else False if flat else None
    made = shell.root.create_queue(unescape(name), dropboxmq=layout, **options_of(settings))
    shell.line({"queue": made.name, "path": made.layout.home}, ("path",))


def doctor(ctx: typer.Context, queues: QueueNames = None) -> int:
    """Test whether a file system is fit for dropq.

    Exits with 1 when it is not. The folder of --root or DROPQ_ROOT need not be a root yet. It tries what dropq needs,
    and reports what it found, what that means and what to set, the worst last. It changes nothing in a queue, and
    removes its own files.
    """
    from dropq.diagnosis.doctor import LEVELS

    for name in queues or ():
        try:
            check_address(unescape(name))
        except InvalidName:
            raise UsageError(f"{name} cannot name a queue: `dropq --root {name} doctor` tests a folder") from None
    if (folder := cast(GlobalOptions, ctx.obj).root) is not None:
        look_into(folder)
    shell = Shell(ctx)
    named = [shell.root.queue(unescape(name)).name for name in queues] if queues else None
    diagnoses = sorted(shell.root.doctor(named), key=lambda diagnosis: LEVELS.index(diagnosis.level))
    if sys.stdout.isatty() and not shell.json:
        for diagnosis in diagnoses:
            output.put(output.coloured(_diagnosis_text(diagnosis, shell.root.layout.path), sys.stdout))
    else:
        shell.show(({key: getattr(diagnosis, key) for key in DIAGNOSIS} for diagnosis in diagnoses), DIAGNOSIS)
    return report_open(diagnoses)


def _diagnosis_text(diagnosis: Diagnosis, root: str) -> str:
    """Write a diagnosis for a terminal: what was found, then, on lines of their own, what it means and what to set."""
    indent = " " * 18
    where = "" if diagnosis.path == root else f"{diagnosis.path}: "
    lines = [(f"{diagnosis.level:8} {diagnosis.check:8} ", f"{where}{diagnosis.found}")]
    if diagnosis.level != "ok":
        lines += [(indent, diagnosis.means), (f"{'':9}{'to do':8} ", diagnosis.advice)]
    width = get_terminal_size().columns
    filled = (
        fill(escape(text), width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
        for start, text in lines
        if text
    )
    return "\n".join(filled)


def options_of(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return the options that `--set` names, by key."""
    options: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {setting}: write KEY=VALUE, such as --set lease_period=5m")
        if key in ("name", "self", "dropboxmq"):
            raise UsageError(f"--set {setting}: {key} is not an option of a queue")
        options[key] = _toml(text)
    return options


def _toml(text: str) -> object:
    try:
        table = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def delete(
    ctx: typer.Context,
    name: QueueName,
    force: Annotated[bool, option("--force", "Also delete messages that wait or are worked on.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Remove a queue with all its history.

    It refuses a queue that has messages to work on, unless --force is given. It removes a subscription, or a topic
    without subscriptions, likewise.
    """
    from dropq.upkeep.queues import contents, refuse_subscriptions, refuse_unsettled, to_work_on

    shell = Shell(ctx)
    try:
        queue = shell.queue(name)
    except NoSuchQueue as error:  # to make it is no way out
        raise NoSuchQueue(str(error).partition(", `dropq create")[0]) from error
    if queue.layout.is_topic:
        refuse_subscriptions(shell.root.context, queue.context)
    counts = contents(queue.context)
    listed = in_states(counts)
    if dry_run:
        refused = not force and bool(to_work_on(counts))
        shell.line({"queue": queue.name, "refused": refused, **counts}, ("queue",))
        output.note(f"{'would be refused without --force' if refused else 'would be deleted'}: {listed}")
        return NEGATIVE if refused else OK
    if not force:
        refuse_unsettled(queue.context)
    shell.confirm(f"Delete queue {queue.name} ({listed})?", yes=yes)
    shell.root.delete_queue(queue.name, force=force)
    if shell.json:
        shell.line({"queue": queue.name, **counts}, ())
    output.note(f"queue {queue.name} is deleted: {listed}")
    return OK


config = group("config", "Show the configuration, and check it.")


@config.command("show", cls=Command)
def config_show(
    ctx: typer.Context, name: QueueName, key: Annotated[str | None, argument("KEY", "Only this key.")] = None
) -> None:
    """Print the settings that are in force for a queue, and the file that each comes from."""
    shell = Shell(ctx)
    queue, root = shell.queue(name), shell.root
    settings = explain_queue(queue.name, root.context.config, root.layout.config_file, queue.layout)
    if key is not None and key not in {setting.key for setting in settings}:
        near = nearest(key, [setting.key for setting in settings])
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UsageError(f"{key} is no key of a queue{hint}: `dropq config show {queue.name}` lists them")

    def records() -> Iterator[Record]:
        for setting in settings:
            if key in (None, setting.key):
                value = setting.value if shell.json else setting.text
                yield {"key": setting.key, "value": value, "source": setting.source}

    shell.show(records(), ("key", "value", "source"))


@config.command("check", cls=Command)
def config_check(
    ctx: typer.Context,
    files: Annotated[list[str] | None, argument("FILE", "The files; by default those of the whole root.")] = None,
) -> int:
    """Check configuration files, each routing.properties and each selector, and print every problem.

    Exits with 78 when there is a problem.
    """
    from dropq.diagnosis import selector_checks

    shell = Shell(ctx)
    if not files:
        shell.check_root()
    checked = files or list(_config_files(shell))
    found = [(file, problem) for file in checked for problem in _check_of(file)(file)]
    if not files:  # in their queues, which other queues may belong to
        for queue in shell.root.queues():
            of_queue = selector_checks.problems_of(shell.root.context, queue.name)
            checked += of_queue
            found += [(file, problem) for file, said in of_queue.items() for problem in said]
        if shell.root.context.config.peer:
            from dropq.diagnosis.peers import examined

            file = shell.root.layout.config_file
            found += [
                (file, f"{file}: {text}") for kind, _, text in examined(shell.root.context) if kind == "peer-differs"
            ]
    problems = [{"file": file, "problem": problem} for file, problem in found]
    shell.show(problems, ("problem",))
    if not problems:
        output.note(f"{len(checked)} files checked, no problem found")
    return CONFIGURATION if problems else OK


@config.command("import", cls=Command)
def config_import(
    ctx: typer.Context,
    file: Annotated[str, argument("FILE", "An AMPS configuration, in XML.")],
    dry_run: DryRun = False,
) -> int:
    """Make the queues of an AMPS configuration queues of this root; prints their names and paths.

    It takes each Queue, QueueDefinition, LocalQueue and GroupLocalQueue below SOW. stderr says which of their keys are
    left out, and why. When one of the queues cannot be made, it makes none.
    """
    from dropq.config.amps import read_queues
    from dropq.upkeep.queues import refuse_taken

    shell = Shell(ctx)
    root = shell.root
    found = [
        (queue, parse_toml(toml_text(queue.options)))
        for queue in read_queues(file, root.context.config, root.layout.config_file)
    ]
    refuse_taken(root.context, (queue.name for queue, _ in found))
    for queue, _ in found:
        if queue.is_shared and not root.context.config.peer:
            why = "roots that name each other share it, and dropq.toml has no [[peer]]"
            output.note(output.escape(f"{queue.name}: {why}"))
        for key, why in queue.left_out.items():
            output.note(output.escape(f"{queue.name}: {key} is left out: {why}"))
    made = [] if dry_run else _made(root, [queue for queue, _ in found])
    for queue, settings in found:
        path = f"{root.path}/{queue.name}" if dry_run else made.pop(0).layout.home
        record = {"queue": queue.name, "path": path, "settings": settings, "left_out": queue.left_out}
        shell.line(record, ("queue", "path"))
    if not found:
        output.note(f"{file} defines no Queue, QueueDefinition, LocalQueue or GroupLocalQueue in SOW of AMPSConfig")
    output.note(f"{'would_create' if dry_run else 'created'}={len(found)}")
    return OK if found else NEGATIVE


def _made(root: Root, wanted: Sequence[AmpsQueue]) -> list[Queue]:
    """Make all queues; if one cannot be made, remove those that were, unless they have got messages."""
    made: list[Queue] = []
    try:
        for queue in wanted:
            made.append(root.create_queue(queue.name, **dict[str, Any](queue.options)))
    except BaseException:
        for new in made:
            try:
                root.delete_queue(new.name)
            except DropqError as error:
                output.note(f"queue {new.name} was made, and stays: {error}")
        raise
    return made


def _check_of(file: str) -> Callable[[str], list[str]]:
    """Return what checks a file, by its name and its folder's."""
    from dropq.diagnosis import selector_checks
    from dropq.policies import routes

    if os.path.basename(file) == ROUTES_FILE:
        return routes.check_file
    return selector_checks.check_file if selector_checks.is_selector_file(file) else check_file


def _config_files(shell: Shell) -> Iterator[str]:
    """Return the configuration files of the root, its queues and topics, which may be too broken to open."""
    root = str(shell.root.path)
    possible = (layouts(root, queue.name) for queue in shell.root.queues())
    of_queues = (file for each in possible for layout in each for file in (layout.config_file, layout.routes_file))
    of_topics = (topic_layout(root, name).config_file for name in topics(shell.root.layout))
    return filter(os.path.exists, dict.fromkeys((shell.root.layout.config_file, *of_queues, *of_topics)))
