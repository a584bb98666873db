"""Read the file that an option names."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from multiring.errors import ArgumentError

Found = TypeVar("Found")


def read_option(option: str, path: Path, parse: Callable[[str], Found], source: str) -> Found:
    """Return what `parse` makes of the text of the file `path`, which `option` names.

    Args:
        option: the option, such as "--profile".
        path: the file.
        parse: makes something of the text, or raises ArgumentError.
        source: the command that writes such files.

    Raises:
        ArgumentError: the file cannot be read, or `parse` has refused it. The error names the option and the file.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{option} {path}: {error}; want a file of {source}") from None
    except ArgumentError as error:
        raise ArgumentError(f"{option} {path}: {error}") from None
