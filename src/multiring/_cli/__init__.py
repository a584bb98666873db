"""The `multiring` command. Each subcommand has its own module; only these modules print."""

import argparse
import importlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from multiring._cli.number_option import require_numbers
from multiring._cli.output import READER_GONE, ReaderGoneError
from multiring._launch.standard_streams import open_closed_streams
from multiring._version import VERSION
from multiring.errors import MultiringError

_NAMES = (
    "bench",
    "caffe",
    "data",
    "doctor",
    "export",
    "horovodrun",
    "lab",
    "manifest",
    "plan",
    "probe",
    "profile",
    "run",
    "settings",
    "simulate",
    "trace",
    "trials",
    "verify",
    "vision",
)


class _Commands(Mapping[str, ModuleType]):
    """The module of each command, imported on its first use: most commands need few of multiring's modules."""

    def __getitem__(self, name: str) -> ModuleType:
        if name not in _NAMES:
            raise KeyError(name)
        return importlib.import_module(f"multiring._cli.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


COMMANDS = _Commands()
_INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Accepts options in full only; for example, -m does not match -machinefile. Checks the numbers that it gets."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and raise ArgumentError for a number out of its option's bounds; a command's parser gets here, too."""
        found, unknown = super().parse_known_args(args, namespace)
        require_numbers(self, found)
        return found, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Keep matches of a one-letter option with its value, as in -n2. argparse's other matches are prefixes. An
        # option without a value does not match either, because an error about -hostfil must not name -h.
        found: list[Any] = super()._get_option_tuples(option_string)
        is_joined = len(option_string) > 2
        return [each for each in found if is_joined and each[1] == option_string[:2] and each[0].nargs != 0]


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with an error that names the unknown words and, if there is one, a similar option."""
    option = unknown[0].partition("=")[0]
    declared = parser._actions  # noqa: SLF001 -- argparse has no public name for it
    known = [name for each in declared if each.help != argparse.SUPPRESS for name in each.option_strings]
    longer = [each for each in known if option.startswith("--") and each.startswith(option)]
    meant = longer or get_close_matches(option, known, n=1)
    parser.error(f"unknown: {' '.join(unknown)}" + (f"; did you mean {' or '.join(meant)}?" if meant else ""))


def main(argv: Sequence[str] | None = None, *, is_kept: bool = False) -> int:
    """Run one command and return its exit code.

    0: done. 1: the answer is no. 2: the input is wrong. Some commands return other codes.

    `is_kept`: this process is the child of a job's keeper, and `--survive-launcher` is done.
    """
    open_closed_streams()
    try:
        return _run(argv, is_kept=is_kept)
    except ReaderGoneError:
        return READER_GONE
    except KeyboardInterrupt:  # Ctrl-C has also interrupted the processes that the command started
        return _INTERRUPTED
    except MultiringError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None, *, is_kept: bool) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = parsed(words)
    arguments.started_by = None if is_kept else list(words)  # what starts the same job again
    code: int = COMMANDS[arguments.command].run(arguments)
    return code


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line, whose numbers are within the bounds of their options.

    Raises:
        SystemExit: with 2, after a message: a word is unknown, missing or of the wrong kind.
        ArgumentError: a number is out of bounds.
    """
    parser = _Parser(
        prog="multiring", description="Data-parallel training over proven collectives.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"multiring {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in words[:1] if words and words[0] in _NAMES else _NAMES:
        module = COMMANDS[name]
        text = (module.__doc__ or "").partition(": ")[2]
        module.add_arguments(
            commands.add_parser(name, help=text.partition("\n")[0], description=text, allow_abbrev=False)
        )
    arguments: argparse.Namespace
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(commands.choices[arguments.command], unknown)
    return arguments
