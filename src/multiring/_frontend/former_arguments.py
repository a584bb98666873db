"""Refuse the former names of arguments, with an error that says the current name."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def former_arguments(**new_names: str) -> Callable[[Function], Function]:
    """Return a decorator that makes a function refuse former names of its arguments.

    Args:
        new_names: the new name of each argument, by its former name.

    Returns:
        The decorator. The decorated function raises TypeError if a caller passes a former name.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            for former in new_names.keys() & keywords.keys():
                raise TypeError(
                    f"{function.__name__}() has no argument {former!r}, which is called {new_names[former]!r} now: "
                    f"write {new_names[former]}={keywords[former]!r}"
                )
            return function(*arguments, **keywords)

        return checked  # type: ignore[return-value] # the wrapper takes the same arguments

    return decorate
