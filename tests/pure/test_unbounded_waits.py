"""Every call that may wait without a limit, where jobs start, end and clean up, and the reason why it cannot last.

A new call of this kind fails here: give it a time-out, or add it with the reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "multiring"
ROOMS = ("_launch", "_exchanges", "_runtime", "_diagnosis", "_cli", "ray", "dask", "spark", "horovod", "lab")
WAITS = {"join", "wait", "get", "result", "acquire", "select", "communicate", "accept"}
RUNS = {"run", "call", "check_call", "check_output"}

OPERATION = "an operation ends at MULTIRING_STALL_TIMEOUT_S, or when a rank is lost"
OVER = "it is over already"
KILLED = "the process has got SIGKILL, and this process's own data depend on its end"
READY = "the socket does not block, or has a time-out of its own"
DAEMON = "a daemon thread, which waits for work as long as its owner lives"
DISK = "the thread writes to a file: a disk that does not answer stops the caller's own writes, too"
JOB = "it lasts as long as the job, and Ctrl-C interrupts it"
TURN = "the thread looks at its stop flag ten times a second"
SET_AT_END = "whatever ends the operation sets it, also in failures"

KNOWN = {
    ("_diagnosis/over_ssh.py", "process.wait()"): KILLED,
    ("_diagnosis/rank_links.py", "own.result()"): OVER,
    ("_diagnosis/relay.py", "listener.accept()"): READY,
    ("_diagnosis/transfers.py", "self._thread.join()"): TURN,
    ("_diagnosis/transfers.py", "sock.accept()"): READY,
    ("_exchanges/munge.py", "listener.accept()"): DAEMON,
    ("_exchanges/munge.py", "self._asking.result()"): OVER,
    ("_exchanges/pmix.py", "running.result()"): OVER,
    ("_exchanges/pmix.py", "self._asking.result()"): OVER,
    ("_exchanges/torch_store.py", "opening.result()"): OVER,
    ("_exchanges/torch_store.py", "self._asking.result()"): OVER,
    ("_launch/control_tcp.py", "self._listener.accept()"): READY,
    ("_launch/function.py", "process.wait()"): JOB,
    ("_launch/function.py", "selector.select()"): JOB,
    ("_launch/job.py", "os.waitpid(member.pid, 0)"): OVER,
    ("_launch/host_discovery.py", "process.wait()"): KILLED,
    ("_launch/job_keeper.py", "self._listener.accept()"): READY,
    ("_launch/kept_launcher.py", "poll.select()"): JOB,
    ("_launch/live_page.py", "self._process.wait()"): KILLED,
    ("_launch/local_point.py", "self._listener.accept()"): READY,
    ("_launch/script_copies.py", "process.wait()"): KILLED,
    ("_launch/watchdog.py", "os.waitpid(self._pid, 0)"): KILLED,
    ("_runtime/bootstrap/rendezvous_server.py", "self._listener.accept()"): READY,
    ("_runtime/engines/nccl.py", "operation.wait()"): OPERATION,
    ("_runtime/engines/nccl.py", "start_agreement(...).wait()"): OPERATION,
    ("_runtime/engines/nccl_device.py", "self._is_put.wait()"): SET_AT_END,
    ("_runtime/engines/staged.py", "calls.run(...).wait()"): OPERATION,
    ("_runtime/engines/staged.py", "self._is_combined.wait()"): SET_AT_END,
    ("_runtime/group/collectives.py", "start_all_reduce(...).wait()"): OPERATION,
    ("_runtime/group/collectives.py", "start_barrier(...).wait()"): OPERATION,
    ("_runtime/group/collectives.py", "start_broadcast(...).wait()"): OPERATION,
    ("_runtime/group/collectives.py", "start_message(...).wait()"): OPERATION,
    ("_runtime/group/collectives.py", "start_reduce(...).wait()"): OPERATION,
    ("_runtime/group/collectives.py", "start_reduce_scatter(...).wait()"): OPERATION,
    ("_runtime/group/engine_calls.py", "handles.get()"): DAEMON,
    ("_runtime/group/engine_calls.py", "self._is_decided.wait()"): SET_AT_END,
    ("_runtime/group/engine_calls.py", "self._is_started.wait()"): SET_AT_END,
    ("_runtime/group/engine_calls.py", "self.agreement.wait()"): OPERATION,
    ("_runtime/group/handles.py", "self._outcome.result()"): OVER,
    ("_runtime/group/handles.py", "self.wait()"): OPERATION,
    ("_runtime/group/posting.py", "handle.wait()"): OPERATION,
    ("_runtime/group/posting.py", "self._handle_of(...).wait()"): OPERATION,
    ("_runtime/group/starting.py", "handle.wait()"): OPERATION,
    ("_runtime/group/varying_rows.py", "handle.wait()"): OPERATION,
    ("_runtime/named/named.py", "report.wait()"): OPERATION,
    ("_runtime/tracing/clocks.py", "handle.wait()"): OPERATION,
    ("_runtime/tracing/recording.py", "self._thread.join()"): DISK,
    ("lab/control_socket.py", "self._listener.accept()"): READY,
    ("lab/goodput.py", "listener.accept()"): READY,
    ("lab/host.py", "os.waitpid(self._pid, 0)"): KILLED,
    ("lab/job.py", "errand.process.wait()"): KILLED,
    ("lab/pid_namespace.py", "os.waitpid(pid, 0)"): JOB,
    ("spark/task.py", "BarrierTaskContext.get()"): "it waits for nothing",
}  # fmt: skip


def waits_in(text: str) -> Iterator[str]:
    """Yield the calls of a module that may wait without a limit, with shortened arguments of calls inside."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, node.func.value
            words = {word.arg for word in node.keywords}
            is_timed = bool(words & {"timeout", "timeout_s", "timeout_seconds", "blocking"})
            is_bare = name in WAITS and not node.args
            is_talk = name == "communicate" and len(node.args) < 2
            is_run = name in RUNS and ast.unparse(owner) == "subprocess"
            is_reaping = name in ("waitpid", "waitid") and "WNOHANG" not in ast.unparse(node)
            if (is_bare or is_talk or is_run or is_reaping) and not is_timed:
                base = f"{ast.unparse(owner.func)}(...)" if isinstance(owner, ast.Call) else ast.unparse(owner)
                yield f"{base}.{name}({', '.join(map(ast.unparse, node.args))})"


def test_every_wait_without_a_limit_has_a_reason() -> None:
    found = {
        (str(path.relative_to(SOURCE)), call)
        for room in ROOMS
        for path in (SOURCE / room).rglob("*.py")
        for call in waits_in(path.read_text("utf-8"))
    }
    assert found - KNOWN.keys() == set(), "give the call a time-out, or add it to KNOWN with a reason"
    assert KNOWN.keys() - found == set(), "remove what is no longer there from KNOWN"


@pytest.mark.parametrize(
    "call",
    [
        "thread.join()", "event.wait()", "tasks.get()", "process.communicate(b'.')", "future.result()",
        "lock.acquire()", "subprocess.run(words, check=True)", "os.waitpid(pid, 0)", "poll.select()",
    ],
)  # fmt: skip
def test_a_wait_is_found(call: str) -> None:
    assert len(list(waits_in(call))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "thread.join(5)", "event.wait(timeout=1)", "', '.join(words)", "words.get('a')", "process.communicate(b'.', 3)",
        "subprocess.run(words, timeout=3)", "os.waitpid(pid, os.WNOHANG)", "process.poll()", "lock.acquire(timeout=1)",
    ],
)  # fmt: skip
def test_a_wait_with_a_limit_is_not_found(call: str) -> None:
    assert list(waits_in(call)) == []
