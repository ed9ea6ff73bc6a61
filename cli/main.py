"""The command `dropq`: the list of commands, and the exit code of every error."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from . import output
from .options import option
from .output import BUG, INTERRUPTED, NEGATIVE, OK
from .parsing import SETTINGS, Command, Group
from .shell import GlobalOptions

#: Every command, under the heading that `dropq --help` lists it by, with the module that has it.
COMMANDS = {
    "Set-up": dict.fromkeys(("init", "create", "delete", "doctor", "config"), "setup"),
    "Look": {
        **dict.fromkeys(("ls", "health", "browse", "show", "cat", "tail"), "look"),
        **{"graph": "graph", "log": "log", "top": "screen", "metrics": "exporter", "web": "serving"},
    },
    "Send and receive": {
        **dict.fromkeys(("send", "receive", "ack", "nack", "fail", "reject", "extend", "reply"), "messages"),
        **dict.fromkeys(("work", "wait"), "working"),
        **dict.fromkeys(("route", "serve"), "serving"),
        "bridge": "bridging",
    },
    "Topics and selectors": {"topic": "topics", "selector": "selectors"},
    "Repair": dict.fromkeys(
        ("requeue", "replay", "move", "expire", "purge", "pause", "resume", "sweep", "prune", "fsck"), "repair"
    ),
}

#: The environment variable by which a shell asks for completions.
COMPLETION = "_DROPQ_COMPLETE"


class _Running(Command):
    """A command that runs another one, which follows `--`: the arguments of the first keep this `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before `--`; all words behind it are arguments of another command."""
        at = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*args[:at], *args[at : at + 1], *args[at:]])


class _Commands(Mapping[str, Any]):
    """The commands by name. A command is imported and built when it is asked for, and does not wait for the others."""

    def __init__(self) -> None:
        self._homes = {name: home for group in COMMANDS.values() for name, home in group.items()}

    def __getitem__(self, name: str) -> Any:
        found = getattr(import_module(f".{self._homes[name]}", __package__), name)
        if isinstance(found, typer.Typer):
            return get_command(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=_Running if name == "work" else Command)(found)
        return get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class _Grouped(Group):
    """All commands; its help lists them under their headings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]

    def known(self) -> list[str]:
        """Return the commands that a hint may name, also those of groups."""
        inner = (f"{name} {each}" for name in self.commands for each in getattr(self.commands[name], "commands", ()))
        return [*self.commands, *inner]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # typer would keep only an exit code
            raise Interrupted(*error.args) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.commands))
        room = formatter.width - widest - 6
        for heading, group in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(widest), self.commands[name].get_short_help_str(room)) for name in group]
                )


class Interrupted(Exception):
    """Raised when Ctrl-C ends a command; the message is what was done until then."""


def _answer(name: str, help: str, answer: Callable[[], str]) -> Any:
    """Return an option that prints an answer, and runs no command."""

    def callback(ctx: typer.Context, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:  # a shell that completes a line does not run it
            print(answer())
            raise typer.Exit(OK)

    return option(name, help, callback=callback, is_eager=True)


def _version() -> str:
    from dropq import __version__

    return f"dropq {__version__}"


def _completion(verb: str) -> Callable[[], str]:
    return lambda: str(getattr(import_module(".completion", __package__), verb)())


def _dropq(
    ctx: typer.Context,
    root: Annotated[
        str | None,
        option(
            "--root DIR",
            "The root; else DROPQ_ROOT in the environment, else the nearest directory with a dropq.toml, from the "
            "working directory up.",
            envvar="DROPQ_ROOT",
        ),
    ] = None,
    json: Annotated[bool, option("--json", "Print one JSON object a line.")] = False,
    version: Annotated[bool, _answer("--version", "Print the version and exit.", _version)] = False,
    install: Annotated[
        bool,
        _answer(
            "--install-completion",
            "Let this shell complete commands, queues and ids: writes a script and, without asking, a line that loads "
            "it into ~/.bashrc or ~/.zshrc; prints where the script is, and how to load it.",
            _completion("install"),
        ),
    ] = False,
    uninstall: Annotated[
        bool,
        _answer(
            "--uninstall-completion",
            "Remove what --install-completion wrote, also its line in ~/.bashrc and ~/.zshrc; prints what that was.",
            _completion("uninstall"),
        ),
    ] = False,
    show: Annotated[
        bool, _answer("--show-completion", "Print this shell's completion script.", _completion("show"))
    ] = False,
) -> None:
    """A message queue made of directories: a message is a file, its state is its folder, each change is one rename.

    stdout carries data, stderr everything else. Exit codes: 0 done, 1 negative or partial, 2 usage, 65 bad data,
    66 no such queue or message, or none to receive, 69 something is not installed, 70 a fault of dropq, 73 cannot
    create, 74 I/O, 75 try later, 77 permission, 78 configuration.
    """
    ctx.obj = GlobalOptions(root, json)


def build() -> typer.Typer:
    """Return the application with all of its commands."""
    app = typer.Typer(
        name="dropq",
        cls=_Grouped,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=SETTINGS,
    )
    app.callback()(_dropq)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, None for the process's own; return its exit code, and raise nothing."""
    if argv is None:
        _set_up()
    if COMPLETION in os.environ:
        from .completion import register

        register()
    try:
        code = get_command(build()).main(args=argv, prog_name="dropq", standalone_mode=False)
        output.flush()
    except typer.TyperException as error:
        return _usage(error)
    except (typer.Abort, KeyboardInterrupt, Interrupted) as error:
        return output.interrupted(error)
    except Exception as error:
        return _failed(error)
    return output.interrupted() if code == INTERRUPTED else code if isinstance(code, int) else OK


def _set_up() -> None:
    # A reader that has seen enough, as in `dropq ls | head -1`, ends us quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent closed it; in this order each takes its own number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where the locale has no such character


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    text = error.format_message().replace(": Value error, ", ": ")  # typer's prefix of a bad choice
    if context is None or text.startswith("Usage:"):
        output.note(text if context else f"error: {text}")
    else:
        output.note(f"{context.get_usage()}\nerror: {text}\n`{context.command_path} --help` lists the options.")
    return getattr(error, "exit_code", NEGATIVE)


def _failed(error: Exception) -> int:
    code = output.exit_code(error)
    output.complain(error)
    if code == BUG and not os.environ.get("DROPQ_DEBUG"):
        output.note(f"This is a fault of dropq ({type(error).__name__}); set DROPQ_DEBUG=1 for the traceback.")
    return code
