"""ssh, as far as launchers need it: run a command on another host of the lab this process is in.

    rsh_agent.py [-OPTIONS] HOST COMMAND...

It asks the lab to start the command with this process's environment, folder, input and output, and ends with its
exit code. Run as a program by itself, without the package: a launcher starts one for each host, and it is to be quick.
"""

import contextlib
import json
import os
import socket
import sys

_HOST_SOCKET = "\0multiring-lab"  # the same in control_socket.py
_TAKE_A_VALUE = "BbcDEeFIiJLlmOopQRSWw"  # options of ssh(1)
_FAILED = 255  # what ssh says when it is not the command that failed


def host_and_command(arguments: list[str]) -> tuple[str, str]:
    """Return the host and the shell's command line in `arguments`, which are ssh's.

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
    """Run the command and return its exit code, or 255 where it could not be run."""
    try:
        host, command = host_and_command(arguments)
        # settings.py, which is to read the environment alone, cannot be imported here: Python runs this with -I -S,
        # so that a launcher's dozens of it start in milliseconds. Nothing is read out of it: it is handed on as it is.
        environment = dict(os.environ)  # noqa: TID251
        request = {"host": host, "command": command, "folder": os.getcwd(), "environment": environment}  # noqa: PTH109
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_HOST_SOCKET)
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [line], [0, 1, 2])
            with contextlib.suppress(BrokenPipeError):  # it has answered already
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
