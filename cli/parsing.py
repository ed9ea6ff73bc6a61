"""How the words of a command line become a command's arguments, and how its help is laid out.

Every command takes `-h`, and `--root` after its name as well as before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import typer
from typer._click.exceptions import NoSuchOption
from typer.core import TyperCommand, TyperGroup

from dropq.hints import nearest

from .examples import EXAMPLES
from .shell import GlobalOptions

#: What `-h` needs to be an option of every command.
SETTINGS = {"help_option_names": ["-h", "--help"]}
#: The explanation of an option's value, which a help shows once.
VALUES = {
    "DURATION": "DURATION is such as 30s, 5m, 1h or 1h30m; a bare number is seconds.",
    "FILTER": 'FILTER is such as "JMSPriority > 4 AND region = \'EU\'" or, for JSON bodies, "/order/total > 100".',
}


class Readable:
    """What commands and groups of commands share: how they convert, complete and show their parameters."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, each with the conversion and the completion of this module."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        params[-1:-1] = _inherited(ctx)  # before --help
        for param in params:
            param.process_value = partial(_process_value, param)
            param.shell_complete = partial(_complete, param)
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what follows the command's name; for an unknown option, hint at a similar one."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except NoSuchOption as error:
            error.possibilities = nearest(
                error.option_name, [name for each in self.get_params(ctx) for name in each.opts], n=3
            )
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name in the line of its usage."""
        arguments = (param for param in self.get_params(ctx) if param.param_type_name == "argument")
        group = [self.subcommand_metavar] if isinstance(self, TyperGroup) else []
        return ["[OPTIONS]", *map(_usage, arguments), *group]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options, what their values look like, and examples."""
        params = self.get_params(ctx)
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            rows = [_row(param) for param in params if param.param_type_name == kind and not param.hidden]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        for value in filter(VALUES.__contains__, dict.fromkeys(param.metavar for param in params)):
            formatter.write_paragraph()
            formatter.write_text(VALUES[value])
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)
        if lines := EXAMPLES.get(ctx.command_path.partition(" ")[2]):
            with formatter.section("Example"):
                formatter.write("".join(f"{' ' * formatter.current_indent}{line}\n" for line in lines))


class Command(Readable, TyperCommand):
    """A command."""


class Group(Readable, TyperGroup):
    """A group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments begin with; for an unknown command, hint at similar commands."""
        if args[0] in self.commands or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        near = ", ".join(f"{name!r}" for name in nearest(args[0], self.known(), n=3))
        instead = f"Did you mean {near}?" if near else ""
        if any(f"--{args[0]}" in parameter.opts for parameter in self.get_params(ctx)):
            instead = f"Did you mean '--{args[0]}'?"
        if [ctx.info_name, args[0]] == ["config", "set"]:
            instead = "Write the setting into queue.toml in the queue's folder, and try it by `dropq config check`."
        ctx.fail(f"No such command {args[0]!r}. {instead}".rstrip())

    def known(self) -> list[str]:
        """Return the commands that a hint may name."""
        return list(self.commands)


def group(name: str, help: str) -> typer.Typer:
    """Return a group that has no commands yet."""
    return typer.Typer(
        name=name, cls=Group, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )


def _inherited(ctx: Any) -> Iterator[Any]:
    """Yield the options that a command, or a group of commands, has from the list of all commands."""
    if ctx.parent is None:
        return
    options = {param.name: copy(param) for param in ctx.find_root().command.params}
    options["root"].help = "The root; the option may also stand before the command."
    for name in ("json", "root"):
        param = options[name]
        param.expose_value, param.envvar, param.callback = False, None, _set
        yield param


def _set(ctx: Any, param: Any, value: Any) -> None:
    """Note an option that is given behind a command, as if it stood before it."""
    if value not in (None, False):
        ctx.obj = replace(ctx.obj or GlobalOptions(None, False), **{param.name: value})


def _process_value(param: Any, ctx: Any, value: Any) -> Any:
    """Convert the value of a parameter for its command. Text and defaults need no conversion.

    typer converts the rest. Its converter imports pydantic, which takes longer than sending a message.
    """
    kind = getattr(param, "type_descriptor", None)  # a typer that keeps it elsewhere converts everything
    if kind is None or (param.required and param.value_is_missing(value)):
        return type(param).process_value(param, ctx, value)
    if value is None:
        value = () if param.multiple or param.nargs == -1 else None
    elif kind.parameter_info.parser is not None:
        value = kind.parameter_info.parser(value)
    elif kind.annotation is int:
        value = _whole(value, param.min)
    elif kind.annotation not in (str, list[str]) and value is not param.default:
        return type(param).process_value(param, ctx, value)
    return value if param.callback is None else param.callback(ctx, param, value)


def _whole(value: int | str, least: int | None) -> int:
    """Return the whole number that a text stands for."""
    try:
        number = int(value)
    except ValueError:
        number = None
    if number is None or (least is not None and number < least):
        allowed = "a whole number" if least is None else f"a whole number from {least} on"
        raise typer.BadParameter(f"{value!r} is not {allowed}")
    return number


def _complete(param: Any, ctx: Any, incomplete: str) -> list[Any]:
    """Return what the shell may offer for the value of a parameter."""
    from . import completion

    found = completion.values(ctx, param.metavar, incomplete)
    return type(param).shell_complete(param, ctx, incomplete) if found is None else found


def _usage(argument: Any) -> str:
    name = argument.display_name_raw + (
        "..." if argument.nargs == -1 and "..." not in argument.display_name_raw else ""
    )
    return name if argument.required else f"[{name}]"


def _row(param: Any) -> tuple[str, str]:
    """Return a line of a help: how a parameter is written, and what it is."""
    if param.param_type_name == "argument":
        return param.display_name_raw, param.help
    written = ", ".join(sorted(param.opts, key=len)) + ("" if param.is_flag else f" {param.display_name_raw}")
    has_default = param.show_default and str(param.default) not in ("None", "False", "")
    notes = [f"[default: {param.default}]"] if has_default else []
    return written, " ".join([param.help, *notes])
