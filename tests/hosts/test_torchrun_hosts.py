"""torchrun on several virtual hosts with nothing set: both rendezvous, restarts, a killed host, and the guide."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import other_installs
from tests.support.page_blocks import BLOCK, ROOT

from multiring.lab import Lab, LabPlan, parse_fault
from multiring.lab.host import Host

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root"),
]

PROGRAM = """
import os, sys, time
if sys.argv[1] == "late" and int(os.environ["RANK"]) >= 2:
    time.sleep(3600)
if sys.argv[1] == "late":
    sys.stdout.write("\\nrank comes\\n")
    sys.stdout.flush()
from pathlib import Path
import numpy as np, multiring
from multiring._runtime.job.job import current
group = multiring.init()
total = np.array([10.0 ** group.rank])
group.all_reduce(total)
secret = current().identity.secret
seen, shown = 0, []
for file in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
    try:
        text = file.read_bytes()
    except OSError:
        continue  # the process has ended
    seen += 1
    shown += [str(file)] * (secret in text or secret.hex().encode() in text)
assert seen > 6 and len(secret) > 8
hosts = len(group.topology.hosts)
sys.stdout.write(f"\\nrank {group.rank} of {group.size}, {hosts} hosts, {total[0]:.0f}, shown in {shown}\\n")
sys.stdout.flush()
group.barrier()
if sys.argv[1] == "fail" and group.rank == 1 and not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").close()
    os._exit(3)
while sys.argv[1] == "wait" and not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
    group.barrier()
group.barrier()
"""
STATIC = ("--master-addr=host0", "--master-port=29500")
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=job")


class Agents:
    """A torchrun on each host of a lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        (folder / "program.py").write_text(PROGRAM)
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, words: list[str], **variables: str) -> None:
        """Start a command of a page on every host."""
        for host in self._lab.hosts:
            self._spawn(host, tuple(words), **variables)

    def start(self, options: tuple[str, ...], *arguments: str, restarts: int = 0, **variables: str) -> None:
        hosts = len(self._lab.hosts)
        for number, host in enumerate(self._lab.hosts):
            rank = () if options == C10D else (f"--node-rank={number}",)
            sizes = (f"--nnodes={hosts}", "--nproc-per-node=2", f"--max-restarts={restarts}")
            command = (sys.executable, "-m", "torch.distributed.run", *sizes, *rank, *options)
            self._spawn(host, (*command, str(self._folder / "program.py"), *arguments), **variables)

    def _spawn(self, host: Host, command: tuple[str, ...], **variables: str) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
        with host.birthplace():
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**kept, "OMP_NUM_THREADS": "1", **variables},
                    preexec_fn=host.preparation(self._folder),  # noqa: PLW1509 -- one thread
                )
            )

    def ends(self) -> list[tuple[int, str]]:
        """Return each agent's exit code and the output of its host."""
        outputs = [process.communicate(timeout=300)[0] for process in self.processes]
        return [(process.returncode, output) for process, output in zip(self.processes, outputs, strict=True)]

    def wait_for_line(self, number: int, beginning: str) -> None:
        """Wait until a host prints a line."""
        process = self.processes[number]
        assert process.stdout is not None
        while not process.stdout.readline().startswith(beginning):
            assert process.poll() is None

    def wait_until_ranks_end(self, number: int, within_s: float) -> None:
        """Wait until no process of the program runs on a host."""
        until = time.monotonic() + within_s
        while found := self.ranks(number):
            assert time.monotonic() < until, found
            time.sleep(0.2)

    def ranks(self, number: int) -> str:
        """Return the processes of the program on a host."""
        host = self._lab.hosts[number]
        with host.birthplace():
            return subprocess.run(
                ["/usr/bin/pgrep", "-fa", r"python[0-9.]* -u .*[p]rogram\.py"],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=240,
                preexec_fn=host.preparation(self._folder),
            ).stdout

    def script(self, number: int, text: str) -> None:
        """Run a shell script as root on a host."""
        host = self._lab.hosts[number]
        with host.birthplace():
            subprocess.run(["/bin/sh", "-c", text], check=True, timeout=240, preexec_fn=host.preparation(self._folder))

    def kill_host(self, number: int) -> None:
        """Kill all processes of a host at once."""
        self._lab.apply(parse_fault(["kill", f"host{number}"], self._lab.plan))

    def end(self) -> None:
        """Kill the hosts and wait for the agents: a host with a child that nobody has waited for does not end."""
        for host in self._lab.hosts:
            if host.is_alive:
                host.kill()
        for process in self.processes:
            process.communicate()


@pytest.fixture(params=[2, 3])
def hosts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def agents(hosts: int, tmp_path: Path) -> Iterator[Agents]:
    with Lab(LabPlan(hosts=hosts)) as lab:
        made = Agents(lab, tmp_path)
        yield made
        made.end()


def said(ends: list[tuple[int, str]]) -> list[str]:
    return sorted(line for _, output in ends for line in output.splitlines() if line.startswith("rank"))


def lines(hosts: int) -> list[str]:
    size = 2 * hosts
    return [f"rank {rank} of {size}, {hosts} hosts, {'1' * size}, shown in []" for rank in range(size)]


@pytest.mark.parametrize("options", [STATIC, C10D], ids=["static", "c10d"])
def test_ranks_meet_with_nothing_set_and_again_after_a_restart(
    agents: Agents, hosts: int, tmp_path: Path, options: tuple[str, ...]
) -> None:
    agents.start(options, "fail", str(tmp_path / "failed"), restarts=1)
    ends = agents.ends()
    assert [code for code, _ in ends] == [0] * hosts, ends
    assert said(ends) == sorted(2 * lines(hosts))


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_killed_host_is_named_and_ends_the_job(agents: Agents, tmp_path: Path) -> None:
    agents.start(STATIC, "wait", str(tmp_path / "never"), MULTIRING_WIRE_TIMEOUT_S="10")
    first = agents.processes[0]
    agents.wait_for_line(0, "rank")
    agents.kill_host(1)
    began = time.monotonic()
    output = first.communicate(timeout=240)[0]
    assert first.returncode != 0
    assert "PeerLostError" in output
    assert time.monotonic() - began < 200, output  # 10 s, and the time of a busy machine


@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize(
    ("number", "script", "words"),
    [
        (1, other_installs.other_multiring(), "ranks run different multiring versions: "),
        (1, other_installs.no_multiring(), "No module named 'multiring'"),
        (0, other_installs.closed_ports(7600, 7620), "a firewall may close this port: MULTIRING_PORTS="),
    ],
    ids=["other version", "no multiring", "closed ports"],
)
def test_bad_input_on_a_host_is_an_error(agents: Agents, number: int, script: str, words: str) -> None:
    agents.script(number, script)
    agents.start(STATIC, "", MULTIRING_INIT_TIMEOUT_S="20", MULTIRING_PORTS="7600-7620")
    ends = agents.ends()
    assert all(code != 0 for code, _ in ends), ends
    assert any(words in output for _, output in ends), ends


@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize("stage", ["init", "training"])
def test_ranks_whose_agent_was_killed_end_too(agents: Agents, tmp_path: Path, stage: str) -> None:
    arguments = ("late",) if stage == "init" else ("wait", str(tmp_path / "never"))
    agents.start(C10D, *arguments, MULTIRING_INIT_TIMEOUT_S="20" if stage == "init" else "300")
    agents.wait_for_line(0, "rank")
    assert len(agents.ranks(0).splitlines()) == 2
    agents.processes[0].kill()
    agents.wait_until_ranks_end(0, 200)  # the time-out of `init`, or what torch's other agent needs to notice


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_secret_of_ones_own_is_used(agents: Agents, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of my own")
    agents.start(STATIC, "", MULTIRING_SECRET_FILE=str(secret))
    ends = agents.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    assert said(ends) == lines(2)


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_the_guides_commands_do_what_they_say(agents: Agents, tmp_path: Path) -> None:
    blocks = list(BLOCK.finditer((ROOT / "docs" / "guide_torchrun.md").read_text("utf-8")))
    (program,) = [block["text"] for block in blocks if block["file"] == "train.py"]
    (tmp_path / "train.py").write_text(program)
    shown = "".join(block["text"] for block in blocks if block["kind"] == "console")
    (one, both, make, own) = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", shown, re.MULTILINE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
    for command, says in (one, make):
        found = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            check=True,
        )
        assert says in found.stdout
    for command, says in (both, own):
        agents.run(["/bin/sh", "-c", command], HOME=str(tmp_path))
        ends = agents.ends()
        assert [code for code, _ in ends] == [0, 0], ends
        assert sum(says in output for _, output in ends) == 1
        agents.processes.clear()
