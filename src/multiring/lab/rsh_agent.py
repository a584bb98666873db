"""A replacement of ssh for launchers in a lab.

It runs a command on another host of the same lab:

    rsh_agent.py [-OPTIONS] HOST COMMAND...

The program asks the lab to start the command with this process's environment, folder, input and output. It ends with
the command's exit code. It does not import the package, because a launcher starts it once per host, so it must start
fast.
"""

import contextlib
import json
import os
import socket
import sys

_HOST_SOCKET = "\0multiring-lab"  # the same in control_socket.py
_TAKE_A_VALUE = "BbcDEeFIiJLlmOopQRSWw"  # the options of ssh(1) that take a value
_FAILED = 255  # ssh's exit code for its own errors


def host_and_command(arguments: list[str]) -> tuple[str, str]:
    """Parse arguments like ssh's; return the host and the shell's command line.

    Raises:
        ValueError: there is no host or no command.
    """
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if len(option) == 2 and option[1] in _TAKE_A_VALUE and rest:
            rest.pop(0)
    if len(rest) < 2:
        raise ValueError(f"want HOST COMMAND..., got {arguments}")
    return rest[0].rpartition("@")[2], " ".join(rest[1:])


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code, or 255 if it could not be run."""
    try:
        host, command = host_and_command(arguments)
        # Elsewhere only settings.py reads the environment, but it cannot be imported here: Python runs this program
        # with -I -S, so it starts in milliseconds. The environment is passed on unchanged.
        environment = dict(os.environ)  # noqa: TID251
        request = {"host": host, "command": command, "folder": os.getcwd(), "environment": environment}  # noqa: PTH109
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_HOST_SOCKET)
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [line], [0, 1, 2])
            with contextlib.suppress(BrokenPipeError):  # the lab has answered already
                connection.sendall(line[sent:])
            answer = json.loads(connection.makefile("rb").readline() or '{"error": "the lab ended"}')
    except (OSError, ValueError) as error:
        answer = {"error": str(error)}
    if "error" in answer:
        sys.stderr.write(f"multiring lab: {answer['error']}\n")
        return _FAILED
    return int(answer["code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
