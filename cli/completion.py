"""What a shell offers for the word at its cursor: names of queues, states, keys, message ids, receipts, files.

typer finds out which parameter the word belongs to. The scripts for the shells are dropq's own: a message's id is
chosen by its sender, so no shell may evaluate, expand or split it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from typer._click.shell_completion import CompletionItem as Item
from typer._click.shell_completion import ShellComplete, add_completion_class

from dropq.config.schema import QueueConfig
from dropq.config.selectors import OPERATIONS, ROLES
from dropq.errors import DropqError, Missing
from dropq.format.addresses import SubscriptionName
from dropq.format.layout import ALL_STATES, UNSETTLED

from .output import escape, unescape

if TYPE_CHECKING:
    from dropq import Message, Queue, Root

#: The most words that are offered.
MOST = 200

FILES = [Item("", type="file")]


# -- what is offered ---------------------------------------------------------------------------------------------


def values(ctx: Any, metavar: str | None, incomplete: str) -> list[Item] | None:
    """Return possible values of a parameter, by its name in the help; None leaves that to typer.

    A root or queue that cannot be read offers nothing: no error may come between a prompt and what is typed there.
    """
    if metavar in ("FILE", "DIR", "-- CMD") or "--" in (ctx.params.get("line") or ()):
        return FILES
    offers = _OFFERS.get((metavar or "").removesuffix("... -- CMD..."))
    if offers is None or (metavar == "ID" and ctx.command.name in ("send", "publish")):  # a new id
        return None
    try:
        found = (escape(text) for text in offers(ctx))
        fitting = (text for text in found if text.startswith(incomplete) and not text.startswith("-"))
        return [Item(text) for text in islice(fitting, MOST)]
    except (DropqError, OSError):
        return []


def _root(ctx: Any) -> Root:
    from dropq import Root

    from .shell import nearest_root

    named = ctx.obj.root if ctx.obj else None
    return Root(named or ctx.find_root().params.get("root") or nearest_root())


def _queues(ctx: Any) -> Iterator[str]:
    return (queue.name for queue in _root(ctx).queues())


def _topics(ctx: Any) -> Iterator[str]:
    from dropq.lifecycle.open_queue import find_layout

    root = _root(ctx)
    names = (queue.name for queue in root.queues() if "/" not in queue.name)
    return (name for name in names if (layout := find_layout(str(root.path), name)) is not None and layout.is_topic)


def _removable(ctx: Any) -> Iterator[str]:
    """Offer the names of a queue's selectors, or of a topic's subscriptions, where one is to be removed."""
    if ctx.command.name == "rm":
        return (selector.name for selector in _queue(ctx).selectors())
    if ctx.command.name != "unsubscribe":
        return iter(())
    topic = _root(ctx).topic(unescape(ctx.params.get("name") or ""))
    folders = (SubscriptionName.of(queue.name.partition("/")[2]) for queue in topic.subscriptions())
    return iter(sorted({found.name for found in folders if found is not None}))


def _queue(ctx: Any) -> Queue:
    """Return the queue that was named before the cursor."""
    return _root(ctx).queue(unescape(ctx.params.get("name") or ""))


def _messages(ctx: Any, states: Iterable[str]) -> Iterator[Message]:
    queue = _queue(ctx)
    return (message for state in states for message in queue.browse(state))


def _ids(ctx: Any) -> Iterator[str]:
    if ctx.command.name == "requeue":
        from dropq.upkeep.bulk import requeued_from

        chosen = ctx.params.get("state")
        states: Iterable[str] = [requeued_from(chosen, to_origin=bool(ctx.params.get("to_origin")))]
    elif any(param.name == "state" for param in ctx.command.params):
        chosen = ctx.params.get("state")
        states = [chosen] if chosen else UNSETTLED
    else:
        states = ["processed"] if ctx.command.name == "replay" else ALL_STATES
    return (message.id for message in _messages(ctx, states))


def _keys(ctx: Any) -> Iterator[str]:
    return (field.name for field in fields(QueueConfig))


_OFFERS: dict[str, Callable[[Any], Iterable[str]]] = {
    "QUEUE": _queues,
    "TO": _queues,
    "TOPIC": _topics,
    "NAME": _removable,
    "OP": lambda ctx: OPERATIONS,
    "ROLE": lambda ctx: ROLES,
    "ID": _ids,
    "RECEIPT": lambda ctx: (message.file for message in _messages(ctx, ["processing"]) if message.owner),
    "KEY": _keys,
    "KEY=VALUE": lambda ctx: (f"{key}=" for key in _keys(ctx)),
    "STATE": lambda ctx: ALL_STATES,
}


# -- how each shell asks, and is answered --------------------------------------------------------------------------


class _Completion(ShellComplete):
    """Answers a script: a line for each offer, which is `plain`, a tab and the word, and then perhaps a tab and help.

    The line `file` asks for the names of files, which the shell knows best.
    """

    def source_vars(self) -> dict[str, Any]:  # abstract; the scripts have no gaps
        return {}

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the begun word at the cursor."""
        *words, incomplete = sys.argv[1:] or [""]
        return words, incomplete

    def format_completion(self, item: Item) -> str:
        """Return the line of an offer; "" for a word that the shell cannot take as it is."""
        if item.type == "file":
            return "file"
        word = self.written(self._option + str(item.value))
        return "" if word is None else "\t".join(["plain", word, *([item.help] if item.help else [])])

    def written(self, word: str) -> str | None:
        """Return a word as the shell's script expects it; None where it cannot stand."""
        return word

    def complete(self) -> str:
        words, incomplete = self.get_completion_args()
        option, equals, _ = incomplete.partition("=")
        #: What stands before the value in the same word, as in `--state=er`.
        self._option = f"{option}=" if equals and option.startswith("-") else ""
        return "\n".join(filter(None, map(self.format_completion, self.get_completions(words, incomplete))))


class _Bash(_Completion):
    """Bash passes the line up to the cursor as it was typed, and takes words with their quotes."""

    name = "bash"
    source_template = """\
_dropq_completion() {
    local kind word
    COMPREPLY=()
    while IFS=$'\\t' read -r kind word _; do
        case $kind in
            file) compopt -o default ;;
            plain) COMPREPLY+=("$word") ;;
        esac
    done < <(
        _DROPQ_COMPLETE=complete_bash _DROPQ_BREAKS=$COMP_WORDBREAKS "$1" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null
    )
    [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]] && compopt -o nospace
    return 0
}
complete -F _dropq_completion dropq
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = sys.argv[-1]
        self._quote, self._kept = "", 0
        words = _split(line)
        start, incomplete, self._quote = words[-1]
        if not self._quote:  # the shell replaces only what follows a character at which it breaks words
            breaks = set(os.environ.get("_DROPQ_BREAKS", "")) - set("\"' \t\n")
            typed = line[start:].replace("\\\\", "  ")  # what a backslash precedes breaks no word
            ends = [at for at, char in enumerate(typed, 1) if char in breaks and typed[at - 2 : at - 1] != "\\"]
            self._kept = len(_split(line[start:][: ends[-1]])[-1][1]) if ends else 0
        return [word for _, word, _ in words[1:-1]], incomplete

    def written(self, word: str) -> str | None:
        """Return what replaces the end of the line: in open quotes as it is, else with backslashes."""
        if self._quote:
            return None if set(word) & set("'" if self._quote == "'" else '"$`\\!') else word
        return re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", word[self._kept :])


class _Zsh(_Completion):
    """Zsh passes words without their quotes, and quotes what it inserts."""

    name = "zsh"
    source_template = """\
#compdef dropq
_dropq_completion() {
    local line
    local -a words_found shown
    while IFS= read -r line; do
        case $line in
            file) _files ;;
            plain$'\\t'*)
                line=${line#*$'\\t'}
                words_found+=("${line%%$'\\t'*}")
                shown+=("${line/$'\\t'/  -- }")
                ;;
        esac
    done < <(_DROPQ_COMPLETE=complete_zsh ${(Q)words[1]} "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    if [[ ${#words_found} -eq 1 && $words_found[1] == *= ]]; then
        compadd -S '' -- "${words_found[@]}"
    elif (( ${#words_found} )); then
        compadd -l -d shown -- "${words_found[@]}"
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _dropq_completion dropq
"""


class _Fish(_Completion):
    """Fish passes the words before the cursor without their quotes, and the word at it as it was typed."""

    name = "fish"
    source_template = """\
function __dropq_completion
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l program $before[1]
    set -e before[1]
    env _DROPQ_COMPLETE=complete_fish $program $before "$current" 2>/dev/null | while read -l line
        set -l parts (string split \\t -- $line)
        switch $parts[1]
            case file
                __fish_complete_path $current
            case plain
                string join \\t -- $parts[2..-1]
        end
    end
end
complete --command dropq --no-files --arguments '(__dropq_completion)'
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        words, current = super().get_completion_args()
        return words, _split(current)[-1][1]


SHELLS: dict[str, type[_Completion]] = {kind.name: kind for kind in (_Bash, _Zsh, _Fish)}


def register() -> None:
    """Let typer answer the scripts of this module."""
    for name, kind in SHELLS.items():
        add_completion_class(kind, name)


def _split(line: str) -> list[tuple[int, str, str]]:
    """Split a line as a shell does; return for each word its start, the word without quotes, and a quote left open."""
    words = [(0, "", "")]
    quote = ""
    at = 0
    while at < len(line):
        char, (start, word, _) = line[at], words[-1]
        if quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif char == "\\" and quote != "'" and at + 1 < len(line):
            at += 1
            word += line[at] if not quote or line[at] in '"\\$`' else f"\\{line[at]}"
        elif char in " \t" and not quote:
            if at > start:
                words.append((at + 1, "", ""))
            else:  # one more space before the word
                words[-1] = (at + 1, "", "")
            at += 1
            continue
        else:
            word += char
        words[-1] = (start, word, quote)
        at += 1
    return words


# -- the scripts ---------------------------------------------------------------------------------------------------


def script() -> tuple[str, str]:
    """Return the name of the shell that runs this command, and its script."""
    import shellingham  # type: ignore[import-untyped]  # a completion needs it never

    try:
        name = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise Missing(f"there is no completion for the shell {name!r}: run this in {', '.join(SHELLS)}")
    return name, SHELLS[name].source_template


def show() -> str:
    """Return the script of the shell that runs this command."""
    return script()[1].removesuffix("\n")


def install() -> str:
    """Write the script of the shell that runs this command; return sentences on where it is, and how to load it."""
    name, text = script()
    path, startup = _paths(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if startup is None:
        return f"The completion for fish is in {path}; fish loads it by itself, in this terminal, too."
    load = _loading(path)
    before = _text_of(startup)
    if load not in before.splitlines():
        with startup.open("a") as file:
            file.write(f"{'' if not before or before.endswith(chr(10)) else chr(10)}{load}\n")
    return (
        f"The completion for {name} is in {path}, and {startup} loads it in each new terminal.\n"
        f"To load it in this one: {load}"
    )


def uninstall() -> str:
    """Remove what `install` wrote, for every shell; return a sentence on each thing that was removed."""
    removed: list[str] = []
    for name in SHELLS:
        path, startup = _paths(name)
        if startup is not None and _loading(path) in (lines := _text_of(startup).split("\n")):
            kept = "\n".join(line for line in lines if line != _loading(path))
            startup.write_bytes(os.fsencode(kept))
            removed.append(f"{startup} does not load the completion for {name} any more.")
        if path.exists():
            path.unlink()
            removed.append(f"{path} is removed.")
            if path.parent.name == "dropq":
                with suppress(OSError):  # something else lies there
                    path.parent.rmdir()
    return "\n".join(removed) or "No completion is installed: nothing was changed."


def _paths(shell: str) -> tuple[Path, Path | None]:
    """Return where the script of a shell lies, and the file in which a line loads it; fish needs no line."""
    home = Path.home()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return config / "fish/completions/dropq.fish", None
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    startup = Path(os.environ.get("ZDOTDIR") or home, ".zshrc") if shell == "zsh" else home / ".bashrc"
    return data / f"dropq/completion.{shell}", startup


def _loading(path: Path) -> str:
    """Return the line by which a shell loads a script."""
    return f"source {quote(str(path))}"


def _text_of(file: Path) -> str:
    return os.fsdecode(file.read_bytes()) if file.exists() else ""
