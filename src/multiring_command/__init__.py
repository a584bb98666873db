"""The entry point of the `multiring` command, outside the package, whose import takes long enough for a Ctrl-C.

Ctrl-C during the import ends the process by the signal, as in any other program, without a traceback.
"""

import signal


def main() -> int:
    """Run the command line; return its exit code."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise ignored, as under nohup
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from multiring._cli import main as command  # noqa: PLC0415 -- see above

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()
