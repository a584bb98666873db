"""The end of a rank's process, after its program."""

import signal

# Whose default action ends a process, and which launchers and schedulers send.
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def ignore_handled_signals() -> None:
    """Ignore the signals that the program handles, as the last step of its process in its main thread.

    An interpreter that ends gives all signals their default action again. Schedulers send a signal more than once, and
    launchers pass it on: a program that has saved and left at the first signal would be killed by the second one, and
    its job would count as failed.
    """
    for number in _ENDING:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
