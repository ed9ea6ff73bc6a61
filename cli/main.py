"""The command `dropq`: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from . import look, messages, output, repair, setup, working
from .output import BUG, INTERRUPTED, NEGATIVE, OK
from .shell import Given

#: Every command, under the heading that `dropq --help` lists it by.
COMMANDS: dict[str, dict[str, Callable[..., int | None]]] = {
    "Set-up": {"init": setup.init, "create": setup.create, "delete": setup.delete, "doctor": setup.doctor},
    "Look": {
        "ls": look.ls,
        "health": look.health,
        "browse": look.browse,
        "show": look.show,
        "cat": look.cat,
        "tail": look.tail,
    },
    "Send and receive": {
        "send": messages.send,
        "receive": messages.receive,
        "ack": messages.ack,
        "nack": messages.nack,
        "fail": messages.fail,
        "reject": messages.reject,
        "extend": messages.extend,
        "work": working.work,
        "wait": working.wait,
    },
    "Repair": {
        "requeue": repair.requeue,
        "move": repair.move,
        "purge": repair.purge,
        "pause": repair.pause,
        "resume": repair.resume,
        "sweep": repair.sweep,
        "prune": repair.prune,
        "fsck": repair.fsck,
    },
}


class _Grouped(TyperGroup):
    """A group whose help lists the commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        widest = max(map(len, self.commands))
        for name, command in self.commands.items():
            rows = headings.setdefault(str(getattr(command, "rich_help_panel", None) or "Commands"), [])
            rows.append((name.ljust(widest), command.get_short_help_str(formatter.width - widest - 6)))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _version(wanted: bool) -> None:
    if wanted:
        from dropq import __version__

        print(f"dropq {__version__}")
        raise typer.Exit(OK)


def _dropq(
    ctx: typer.Context,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="DIR",
            envvar="DROPQ_ROOT",
            help="The root. Else the nearest directory, from the working directory up, that has a dropq.toml.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A message queue made of directories: a message is a file, its state is its folder, each change is one rename.

    stdout carries data, stderr everything else. Exit codes: 0 done, 1 negative or partial, 2 usage, 65 bad data,
    66 no such queue or message, or none to receive, 69 something is not installed, 70 a fault of dropq, 73 cannot
    create, 74 I/O, 75 try later, 77 permission, 78 configuration.
    """
    ctx.obj = Given(root or None, json)


def build() -> typer.Typer:
    """Return the application with all of its commands."""
    app = typer.Typer(name="dropq", cls=_Grouped, no_args_is_help=True, rich_markup_mode=None)
    app.callback()(_dropq)
    config = typer.Typer(help="Tell what configuration says, and check it.", no_args_is_help=True)
    config.command("show")(setup.config_show)
    config.command("check")(setup.config_check)
    for heading, commands in COMMANDS.items():
        for name, function in commands.items():
            app.command(name, rich_help_panel=heading)(function)
    app.add_typer(config, name="config", rich_help_panel="Set-up")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; no error of any kind leaves it.

    Args:
        argv: the arguments; None takes the process's own, and sets the process up as a command of a shell.
    """
    if argv is None:
        _set_up()
    try:
        code = get_command(build()).main(args=argv, prog_name="dropq", standalone_mode=False)
        output.flush()
    except typer.TyperException as error:
        return _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        output.note("\ninterrupted")
        return INTERRUPTED
    except Exception as error:
        return _failed(error)
    return code if isinstance(code, int) else OK


def _set_up() -> None:
    # A reader that has seen enough, as in `dropq ls | head -1`, ends us quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us; in this order each takes its own number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where the locale has no such character


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    text = error.format_message().replace(": Value error, ", ": ")  # what the parser of options says of a choice
    if context is None or text.startswith("Usage:"):
        output.note(text if context else f"error: {text}")
    else:
        output.note(f"{context.get_usage()}\nerror: {text}\n`{context.command_path} --help` tells more.")
    return getattr(error, "exit_code", NEGATIVE)


def _failed(error: Exception) -> int:
    code = output.exit_code(error)
    output.complain(error)
    if code == BUG and not os.environ.get("DROPQ_DEBUG"):
        output.note(f"This is a fault of dropq ({type(error).__name__}); set DROPQ_DEBUG=1 for the traceback.")
    return code
