"""The job's secret: the ranks have it, their child processes do not, and an empty secret is rejected."""

import hashlib
import hmac
import os
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks
from tests.support.strangers import MAGIC, PROTOCOL, listening_port

import multiring
from multiring._settings import Settings

NONCE = b"n" * 16


def proves_itself_without_a_secret(port: int, job: str, caller: int, called: int) -> bool:
    """Return whether the rank that listens at `port` sends the proof of a job with an empty secret."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(MAGIC + struct.pack("<IIII", PROTOCOL, caller, called, 0) + NONCE)
        answer = line.recv(48, socket.MSG_WAITALL)
    nonce, proof = answer[:16], answer[16:]
    words = f"called|{job}|{caller}|{called}|0|".encode() + NONCE + nonce
    return hmac.compare_digest(proof, hmac.digest(b"", words, hashlib.sha256))


def join_without_a_secret(here: Here, **settings: str) -> bool:
    del os.environ["MULTIRING_SECRET"]
    group = here.join(**settings)
    total = np.ones(100_000)
    group.all_reduce(total)
    assert (total == here.size).all()
    ports = group.all_gather(np.array([listening_port()]))
    job = Settings.from_environment().job or ""
    guessed = here.rank == 0 and proves_itself_without_a_secret(int(ports[1]), job, 0, 1)
    group.barrier()
    return guessed


@pytest.mark.parametrize("engine", ["tcp", "shm+tcp"])
def test_where_the_launcher_gave_none_rank_0_draws_one(engine: str) -> None:
    assert run_ranks(join_without_a_secret, 4, engine=engine) == [False] * 4


def test_rails_of_one_host_have_one_too() -> None:
    rails = {"rails": "127.0.0.1,127.0.0.2"}
    assert run_ranks(join_with_rails, 2, rails, engine="tcp") == [False] * 2


def join_with_rails(here: Here, rails: dict[str, str]) -> bool:
    return join_without_a_secret(here, **rails)


def start_a_child(here: Here) -> list[str]:
    before = os.environ["MULTIRING_SECRET"]
    found = []
    for _ in range(2):  # the second `init` finds the secret too
        group = here.join()
        assert Settings.from_environment().secret == before
        program = "import os; print([name for name, value in os.environ.items() if 'SECRET' in name])"
        child = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        found.append(child.stdout.strip())
        group.barrier()
        multiring.shutdown()
    return found


def test_what_a_rank_starts_does_not_inherit_it() -> None:
    assert run_ranks(start_a_child, 2) == [["[]", "[]"]] * 2
