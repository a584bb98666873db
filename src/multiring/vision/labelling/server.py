"""Serve the page of a project: `serve_page`."""

import getpass
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from multiring._web.guard import listening_socket
from multiring._web.loopback import is_loopback
from multiring._web.token_files import read_tokens
from multiring.vision.labelling.application import LabellingService, create_application


def serve_page(folder: Path, host: str, port: int, token_file: Path | None, ready: Callable[[str], None]) -> None:
    """Serve the page of a project until the process gets SIGINT or SIGTERM.

    Args:
        folder: the project's folder.
        host: the address to listen on.
        port: the port; 0 is a free one.
        token_file: the file whose first token clients must have, without which only loopback addresses are allowed.
        ready: gets the page's address once it can be opened.

    Raises:
        ArgumentError: other machines can reach the address and there is no token, the port is in use, or the file of
            the token is unusable: see `read_tokens`.
    """
    token = None if token_file is None else read_tokens(token_file)[0]
    service = LabellingService(folder, _author() if is_loopback(host) else "")
    application = create_application(service, host, token)
    listening = listening_socket(host, port)
    try:
        config = uvicorn.Config(
            application,
            lifespan="off",
            log_level="warning",
            access_log=False,  # a log of requests would have the names of pictures
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            limit_concurrency=256,
        )
        ready(f"http://{_shown(host, listening)}/")
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        service.proposals.stop()
        listening.close()


def _author() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in the system's list
        return ""


def _shown(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
