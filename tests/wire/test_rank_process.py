"""Only one of the processes that inherit a real launcher's variables becomes the rank."""

import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

DEADLINE_S = 240.0
AT_ONCE_S = 100.0  # from the `init` of a second process to its error; the time-out of `init` is 300 s
JOINS = """
import sys, time
import multiring
from multiring.errors import StateError
began = time.monotonic()
try:
    group = multiring.init()
except StateError as error:
    print("refused", round(time.monotonic() - began, 2), error)
    sys.exit(7)
print("joined", group.rank, group.size)
"""
SURROUNDINGS = {
    "multiring": {"MULTIRING_RANK": "0", "MULTIRING_SIZE": "1", "MULTIRING_RENDEZVOUS": "@TOKEN"},
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "TOKEN", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    },
}  # fmt: skip


def environment_of(launcher: str, **others: str) -> dict[str, str]:
    token = secrets.token_hex(8)
    said = {name: text.replace("TOKEN", token) for name, text in SURROUNDINGS[launcher].items()}
    return {**os.environ, **said, **others}


def ended(words: list[str], environment: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.fixture
def joins(tmp_path: Path) -> Path:
    (tmp_path / "joins.py").write_text(JOINS, encoding="utf-8")
    return tmp_path


# Launchers differ in the name of a job alone, so one case suffices for each but the first.
@pytest.mark.parametrize(
    ("launcher", "behind"),
    [
        *(("multiring", each) for each in ("", "exec ", "env A=1 ", "sh -c 'exec \"$@\"' - ", "nice ")),
        ("torchrun", ""),
    ],
)
def test_the_first_process_is_the_rank_and_then_the_next_command(joins: Path, launcher: str, behind: str) -> None:
    command = f"{behind}{sys.executable} joins.py"
    both = command if behind == "exec " else f"{command}; {command}"
    done = ended(["sh", "-c", both], environment_of(launcher), joins)
    assert done.stdout == "joined 0 1\n" * (1 if behind == "exec " else 2), done.stderr


@pytest.mark.parametrize(
    ("launcher", "by"),
    [
        *(("multiring", each) for each in ("child", "copied environment", "sibling", "orphan", "other session")),
        *(("torchrun", each) for each in ("child", "sibling")),
    ],
)
def test_no_other_process_joins_beside_a_rank(joins: Path, launcher: str, by: str) -> None:
    rank = {
        "child": "subprocess.run([sys.executable, 'joins.py'])",
        "copied environment": "subprocess.run([sys.executable, 'joins.py'], env=before)",
        "sibling": """
        for _ in range(2000):
            time.sleep(0.05 * (not os.path.exists("over")))
        """,
        "orphan": "subprocess.run(['sh', '-c', f'{sys.executable} joins.py & wait $!'], env=before)",
        "other session": "subprocess.run([sys.executable, 'joins.py'], start_new_session=True, env=before)",
    }[by]
    text = f"""
        import os, subprocess, sys, time
        before = dict(os.environ)
        import multiring
        multiring.init()
        print("rank", os.getpid(), flush=True)
        open("up", "w").close()
        {rank}
    """
    (joins / "rank.py").write_text(textwrap.dedent(text), encoding="utf-8")
    beside = f"until [ -e up ]; do sleep 0.05; done; {sys.executable} joins.py; touch over; wait"
    second = beside if by == "sibling" else "wait"
    done = ended(["sh", "-c", f"{sys.executable} rank.py & {second}"], environment_of(launcher), joins)
    words = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "joined" not in words, done.stdout
    waited_s, _, told = words["refused"].partition(" ")
    assert float(waited_s) < AT_ONCE_S
    assert f"process {words['rank']} (" in told
    assert "multiring run -n 1" in told
    assert all(name in told for name in ("MULTIRING_RANK=0",) if launcher == "multiring")


def test_a_claim_that_a_fork_holds_open_is_not_in_the_way(joins: Path) -> None:
    text = """
        import ctypes, os, time
        import multiring
        multiring.init()
        if ctypes.CDLL(None).fork() == 0:  # as native code does: Python's own handlers do not run
            os.closerange(0, 3)
            time.sleep(8)
            os._exit(0)
        os._exit(0)
    """
    (joins / "forks.py").write_text(textwrap.dedent(text), encoding="utf-8")
    done = ended(
        ["sh", "-c", f"{sys.executable} forks.py; {sys.executable} joins.py"], environment_of("multiring"), joins
    )
    assert done.stdout == "joined 0 1\n", done.stderr


def test_a_rank_can_be_asked_often(joins: Path) -> None:
    asks = (
        "import secrets, sys\n"
        "from multiring._runtime.bootstrap.rank_process import claim\n"
        "print(*{str(claim(sys.argv[1])).split()[1] for _ in range(40)})\n"
    )
    text = (
        f"import os, subprocess, sys\nfrom multiring._runtime.bootstrap.rank_process import claim\n"
        f"claim(sys.argv[1])\nprint(os.getpid(), flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {asks!r}, sys.argv[1]], check=True)\n"
    )
    done = ended([sys.executable, "-c", text, secrets.token_hex(8)], dict(os.environ), joins)
    rank, told = done.stdout.splitlines()
    assert told == rank, done.stderr  # without the check, the tenth process became a rank too


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_know_the_rank_and_do_not_communicate(joins: Path, method: str) -> None:
    text = f"""
        import multiprocessing, sys
        import numpy as np
        import multiring
        from multiring.errors import StateError

        context = multiprocessing.get_context({method!r})
        if {method!r} == "forkserver" and __name__ == "__main__":
            multiprocessing.set_forkserver_preload(["__main__"])
            context.Process(target=print).start()  # the server begins before there is a rank
        group = multiring.init()

        def work(number):
            told = [multiring.rank(), multiring.size(), multiring.local_rank(), multiring.local_size()]
            try:
                multiring.world().all_reduce(np.ones(2))
            except StateError as error:
                told.append("multiprocessing worker" in str(error))
            return told

        if __name__ == "__main__":
            with context.Pool(2) as pool:
                answers = pool.map(work, range(4))
            group.barrier()
            assert answers == [[group.rank, 2, group.rank, 2, True]] * 4, answers
            print("right", flush=True)
    """
    (joins / "workers.py").write_text(textwrap.dedent(text), encoding="utf-8")
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "workers.py"]
    done = ended(command, dict(os.environ), joins)
    assert done.stdout.count("right") == 2, done.stdout + done.stderr


def test_random_trees_of_processes_have_one_rank_at_a_time(joins: Path) -> None:
    """Each node of a random tree joins before or after it starts its children, and some stay alive for a while."""
    node = """
        import json, os, subprocess, sys, time
        plan = json.loads(sys.argv[1])
        import multiring
        from multiring.errors import StateError
        def join():
            try:
                multiring.init()
                print("B", os.getpid(), flush=True)
            except StateError:
                pass
        if plan["joins"] == "before": join()
        children = [subprocess.Popen([sys.executable, __file__, json.dumps(each)]) for each in plan["children"]]
        if plan["joins"] == "after": join()
        for each in children: each.wait()
        if multiring.is_initialized(): print("E", os.getpid(), flush=True)
    """
    (joins / "node.py").write_text(textwrap.dedent(node), encoding="utf-8")
    draw = random.Random(33)  # noqa: S311 -- the same trees each time

    def tree(depth: int) -> dict[str, object]:
        children = [tree(depth - 1) for _ in range(draw.randint(0, 2))] if depth else []
        return {"joins": draw.choice(["before", "after", "never"]), "children": children}

    began = time.monotonic()
    for _ in itertools.takewhile(lambda _: time.monotonic() - began < 8, range(6)):
        done = ended([sys.executable, "node.py", json.dumps(tree(2))], environment_of("multiring"), joins)
        assert done.returncode == 0, done.stderr
        inside: set[str] = set()
        for kind, pid in (line.split() for line in done.stdout.splitlines()):
            (inside.add if kind == "B" else inside.discard)(pid)
            assert len(inside) <= 1, done.stdout
