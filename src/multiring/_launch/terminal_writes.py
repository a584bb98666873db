"""Write to an output that poll reports as writable, without ever blocking.

A pipe takes PIPE_BUF bytes then. A terminal that nobody reads, such as one stopped by Ctrl-S or one of a laptop that
sleeps, is reported as writable as long as it takes one byte more, and blocks in the middle of a longer write. The
launcher would hear neither signals nor other hosts meanwhile.
"""

import os


def write_ready(descriptor: int, data: bytes | bytearray) -> int:
    """Write some of `data` to the file of `descriptor`, and return how many bytes were written.

    Raises:
        BlockingIOError: the terminal takes nothing at the moment.
        OSError: the output is broken.
    """
    if not os.isatty(descriptor):
        return os.write(descriptor, data)
    # Other processes share the descriptor's file status, so this write gets an opening of its own.
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # the terminal is that of another user, or has gone
        return os.write(descriptor, data)
    try:
        return os.write(own, data)
    finally:
        os.close(own)
