"""Search a host for the secret of a job, in every place that another user can read; with the standard library alone.

    python3 secret_search.py [--left] [--folders FOLDER,...] [--but FILE] SECRET [OWNER ...]

It runs as root and prints the places as a JSON list. It reads command lines as they are, and files with the rights of
a user who owns nothing. An environment counts, except one that only a user with one of the numbers OWNER can read.
With `--left`, for a job that has ended, it reads files as root. FILE is the one that the user has given to the job.
SECRET may be "-": the secret is then the first line of standard input.
"""

import argparse
import base64
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "/home,/tmp,/dev/shm,/var/spool,/var/log,/run"
# Where a virtual host of Slurm has its own folder, with a plan, and installations of Python, which no job writes to.
ASIDE = Path("/run/aside")
MOST_BYTES = 1 << 26
NOBODY = 65534
# Ranks that show the job's secret in hexadecimal digits, and wait for the file that they are given.
SHOW = """
import os, sys, time
import multiring
from multiring._runtime.job.job import current
group = multiring.init()
if group.rank == 0:
    sys.stdout.write(current().identity.secret.hex() + "\\n")
    sys.stdout.flush()
until = time.monotonic() + 600
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.1)
"""


def secret_shown(line: bytes) -> str:
    """Return the secret in a line of SHOW under `multiring run`, whose secrets are texts."""
    return bytes.fromhex(line.decode().removeprefix("[0] ").strip()).decode()


def forms_of(secret: str) -> set[bytes]:
    """Return the forms in which a secret may be written: as text, in hexadecimal digits and in base 64, or as bytes."""
    written = {secret.encode()}
    with contextlib.suppress(ValueError):
        written.add(bytes.fromhex(secret))
    texts = {form for each in written for form in (each.hex().encode(), base64.b64encode(each).rstrip(b"="))}
    return written | texts


def in_processes(forms: set[bytes], owners: set[int]) -> Iterator[str]:
    """Yield the command lines and environments that another user can read and that have one of `forms`."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == str(os.getpid()):
            continue
        for name in ("cmdline", "environ"):
            try:
                state = (process / name).stat()
                if name == "environ" and state.st_uid in owners and not state.st_mode & 0o077:
                    continue
                text = (process / name).read_bytes()
            except OSError:
                continue  # it has ended
            if any(form in text for form in forms):
                yield str(process / name)


def in_files(forms: set[bytes], folders: list[str]) -> Iterator[str]:
    """Yield the files that this process can read and that have one of `forms`."""
    for top in folders:
        for folder, below, names in os.walk(top):
            if Path(folder).parent == ASIDE and "plan.json" not in names:
                below.clear()
                continue
            for path in (Path(folder) / name for name in names):
                try:
                    if not path.is_file() or path.is_symlink() or path.stat().st_size > MOST_BYTES:
                        continue
                    text = path.read_bytes()
                except OSError:
                    continue  # only its owner may read it, or it is gone
                if any(form in text for form in forms):
                    yield str(path)


def main() -> None:
    """Search, and print the places."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--left", action="store_true")
    parser.add_argument("--folders", default=FOLDERS)
    parser.add_argument("--but", default="")
    parser.add_argument("secret")
    parser.add_argument("owners", nargs="*", type=int)
    options = parser.parse_args()
    is_input = options.secret == "-"  # noqa: S105 -- no secret
    forms = forms_of(sys.stdin.readline().strip() if is_input else options.secret)
    found = list(in_processes(forms, set(options.owners)))
    if not options.left and os.geteuid() == 0:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    found += [path for path in in_files(forms, options.folders.split(",")) if path != options.but]
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
