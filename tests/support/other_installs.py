"""Shell scripts that change what one virtual host sees: another multiring, another Python, or closed ports.

A script runs as root on the host. Files are bound over others in the host's own mount namespace, so the other hosts
and the machine keep theirs.
"""

import shlex
import sys
from pathlib import Path

import multiring

PACKAGE = Path(multiring.__file__).parent
PYTHON = Path(sys.executable).resolve()
_OWN = "/dev/shm/.other"  # noqa: S108 -- on the host's own tmpfs
# Reports a later release of Python than the real one, whose files and code it uses.
_SITE = """
import sys
from collections import namedtuple
names = "major minor micro releaselevel serial"
sys.version_info = namedtuple("version_info", names)(*sys.version_info[:2], 99, "final", 0)
"""
_START = f"set -e; mkdir -p {_OWN}; chmod 755 {_OWN}; "


def _over(text: str, place: Path, mode: str = "755") -> str:
    """Return a script that binds a file with a text over another file."""
    mine = f"{_OWN}/{place.name}"
    return f"printf %s {shlex.quote(text)} >{mine}; chmod {mode} {mine}; mount --bind {mine} {place}; "


def other_multiring() -> str:
    """Return the script after which the host has multiring 0.0.7."""
    hide = f"[ ! -d {PACKAGE}/__pycache__ ] || mount -t tmpfs -o mode=755 tmpfs {PACKAGE}/__pycache__; "
    return _START + hide + _over('VERSION = "0.0.7"\n', PACKAGE / "_version.py")


def no_multiring() -> str:
    """Return the script after which the host has no multiring."""
    missing = 'raise ModuleNotFoundError("No module named \'multiring\'", name="multiring")\n'
    place = f"mount -t tmpfs -o mode=755 tmpfs {PACKAGE}; "
    return f"{_START}{place}printf %s {shlex.quote(missing)} >{PACKAGE}/__init__.py; chmod 644 {PACKAGE}/__init__.py"


def other_python() -> str:
    """Return the script after which this Python says on the host that it is another release: its last number is 99."""
    real, site = f"{_OWN}/real", f"{_OWN}/site"
    words = f'export PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}; exec -a "$0" {real} "$@"'
    script = f"cp {PYTHON} {real}; chmod 755 {real}; mkdir -p {site}; "
    script += f"printf %s {shlex.quote(_SITE)} >{site}/sitecustomize.py; chmod -R a+rX {site}; "
    return _START + script + _over(f"#!/bin/bash\n{words}\n", PYTHON)


def closed_python() -> str:
    """Return the script after which this Python is, on the host, a file that the user must not execute."""
    return _START + _over("of another user\n", PYTHON, mode="600")


def undone() -> str:
    """Return the script that undoes the others."""
    places = " ".join(str(place) for place in (PACKAGE / "_version.py", PACKAGE / "__pycache__", PACKAGE, PYTHON))
    return f"for place in {places}; do umount -l $place 2>/dev/null || true; done; rm -rf {_OWN}; {_opened()}"


def closed_ports(first: int, last: int) -> str:
    """Return the script after which no connection to these ports of the host gets an answer, as behind a firewall."""
    return f"ip rule add priority 99 ipproto tcp sport {first}-{last} blackhole"


def _opened() -> str:
    return "while ip rule del priority 99 2>/dev/null; do true; done"
