"""Replace closed standard streams by /dev/null.

A caller closes them with the shell's `>&-`, for example.

Otherwise the next file that this process opens would get the number of the closed stream, and other code would use the
file as the stream.
"""

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed."""
    for number, name in enumerate(_NAMES):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # a lower descriptor was free
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False, encoding="utf-8"))
