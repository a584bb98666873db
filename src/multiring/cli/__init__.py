"""The `multiring` command: one file a subcommand; the only printers."""

import argparse
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from multiring.cli import bench, caffe, data, horovodrun, lab, plan, probe, run, settings, trace
from multiring.cli.output import READER_GONE, ReaderGoneError
from multiring.errors import MultiringError
from multiring.launch.standard_streams import open_closed_streams
from multiring.version import VERSION

COMMANDS = {
    "bench": bench,
    "caffe": caffe,
    "data": data,
    "horovodrun": horovodrun,
    "lab": lab,
    "plan": plan,
    "probe": probe,
    "run": run,
    "settings": settings,
    "trace": trace,
}


_INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Takes options as they are written: -m is no short form of -machinefile."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # A value may follow an option of one letter at once, as in -n2; argparse's other guesses are prefixes.
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] == option_string[:2] and len(option_string) > 2]


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End with what is unknown, and which option was meant, if that can be told."""
    option = unknown[0].partition("=")[0]
    declared = parser._actions  # noqa: SLF001 -- no other way
    known = [name for each in declared if each.help != argparse.SUPPRESS for name in each.option_strings]
    longer = [each for each in known if option.startswith("--") and each.startswith(option)]
    meant = longer or get_close_matches(option, known, n=1)
    parser.error(f"unknown: {' '.join(unknown)}" + (f"; did you mean {' or '.join(meant)}?" if meant else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 done, 1 the answer is no, 2 your input is wrong, or what the command says."""
    open_closed_streams()
    parser = _Parser(
        prog="multiring", description="Data-parallel training over proven collectives.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"multiring {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").partition(": ")[2]
        module.add_arguments(
            commands.add_parser(name, help=text.partition("\n")[0], description=text, allow_abbrev=False)
        )
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(commands.choices[arguments.command], unknown)
    try:
        code: int = COMMANDS[arguments.command].run(arguments)
    except ReaderGoneError:
        return READER_GONE
    except KeyboardInterrupt:  # what it started has heard of it, too
        return _INTERRUPTED
    except MultiringError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 2
    return code
