"""Start a module of multiring as a program, whatever files the current folder has."""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of multiring.

    `python -m` imports from the current folder first, before the standard library: a file secrets.py in the user's home
    would take the place of the module. The option -P is too new for Python 3.10.
    """
    start = f'import sys; sys.path[0] or sys.path.pop(0); import runpy; runpy._run_module_as_main("{module}")'
    # The package may have imported the module already, which runpy warns of.
    return [sys.executable, "-Wignore::RuntimeWarning:runpy", "-c", start, *arguments]
