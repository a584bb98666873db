"""The `multiring` command's first lines, apart from the package, whose import takes long enough to be interrupted.

Ctrl-C while modules are imported ends the process by the signal, as it ends any other program; no traceback is written.
"""

import signal


def main() -> int:
    """Run the command line; return its exit code."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as by nohup
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from multiring.cli import main as command  # noqa: PLC0415 -- see above

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()
