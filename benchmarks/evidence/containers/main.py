"""Build the container image and train in it under restrictions (as root).

    sudo python benchmarks/evidence/containers/main.py [--only TEXT]

The image is packaging/Containerfile's; docs/guide_containers.md lists the restrictions. It needs podman, runc or crun,
netavark, aardvark-dns and mmdebstrap (Debian: apt-get install). The commands of the page run as they stand. No registry
may be reachable, so an image with the name of the default base is made by mmdebstrap. Its /etc/pip.conf names this
machine's package indexes, and the release of torch that the tests use. Images stay in multiring's cache folder, so the
next run is shorter. The exit code is 1 if a check fails.
"""

import argparse
import ast
import json
import os
import re
import resource
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from tests.support import secret_search

from multiring._settings import cache_folder, inherited_environment

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guide_containers.md"
PLAIN = "localhost/multiring-base:bookworm"
BASE = "docker.io/library/debian:bookworm-slim"  # the default of packaging/Containerfile
NEEDED = ("podman", "mmdebstrap")
SECCOMP = Path("/usr/share/containers/seccomp.json")
DEADLINE_S = 300.0
BUILD_S = 3000.0
LOSS_S = 90.0  # a killed container must be noticed within this time

SUM = """
import os, numpy as np, multiring
group = multiring.init()
array = np.full(1_000_000, group.rank + 1.0)
group.all_reduce(array)
readers = group._calls.services.context.read_by()
print(f"rank {group.rank} of {group.size}: sum {array[0]}, user {os.getuid()}, readers {readers}", flush=True)
"""
TRAIN = """
import numpy as np, torch
import multiring.torch as mt
mt.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
mt.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
inputs = torch.randn(64, 8)
wanted = inputs.sum(1, keepdim=True)
for step in range(40):
    part = slice(mt.rank(), None, mt.size())
    loss = ((model(inputs[part]) - wanted[part]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = mt.allreduce(((model(inputs) - wanted) ** 2).mean().detach()).item()
print(f"rank {mt.rank()} of {mt.size()}: loss {total:.5f}", flush=True)
"""
EAT = """
import numpy as np, multiring
group = multiring.init()
kept = []
while group.rank == 1:
    kept.append(np.ones(4_000_000))
group.barrier()
"""
LOAD = """
import torch, multiring
multiring.init()
class Large(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(2_000_000)
for batch in torch.utils.data.DataLoader(Large(), batch_size=2, num_workers=2): pass
print("loaded", flush=True)
"""
WAIT = """
import multiring, time
group = multiring.init()
print("joined", group.rank, flush=True)
while True:
    group.barrier()
    time.sleep(0.1)
"""
SCRIPTS = {"sum.py": SUM, "train.py": TRAIN, "eat.py": EAT, "load.py": LOAD, "wait.py": WAIT}


@dataclass(frozen=True, slots=True)
class Done:
    """An ended command."""

    code: int
    out: str


@dataclass(frozen=True, slots=True)
class Check:
    """A container with restrictions, and what must come of it."""

    name: str
    options: tuple[str, ...]
    command: str
    is_right: Callable[[Done], bool]


def sums(readers: Callable[[int], str], user: int = 1000) -> Callable[[Done], bool]:
    """Return a check that both ranks summed as `user`, and that `readers` of a rank could read its memory."""

    def is_right(done: Done) -> bool:
        lines = [f"rank {rank} of 2: sum 3.0, user {user}, readers {readers(rank)}" for rank in (0, 1)]
        return done.code == 0 and all(line in done.out for line in lines)

    return is_right


def fails(*words: str, code: int = 1) -> Callable[[Done], bool]:
    """Return a check that the command failed, and that its output has `words`."""
    return lambda done: done.code == code and all(word in done.out for word in words)


def read_each_other(rank: int) -> str:
    """Return the readers of a rank where the ranks read each other's memory."""
    return str([1 - rank])


def nobody(_rank: int) -> str:
    """Return the readers of a rank where no rank may read another's memory."""
    return "[]"


def checks(folder: Path) -> list[Check]:
    """Return the checks of single containers; `folder` has the seccomp profiles."""
    run = "multiring run -n 2 sum.py"
    bare = ("--read-only", "--read-only-tmpfs=false")
    threads = "import torch; print('threads', torch.get_num_threads())"
    return [
        Check("the image's user", (), "id", lambda done: "uid=1000(trainer) gid=1000(trainer)" in done.out),
        Check("no restriction", (), run, sums(read_each_other)),
        Check("a user without a name", ("--user", "12345", *bare), run, sums(read_each_other, 12345)),
        Check(
            "no capabilities", ("--cap-drop", "all", "--security-opt", "no-new-privileges"), run, sums(read_each_other)
        ),
        Check("a read-only root", bare, run, sums(read_each_other)),
        Check("a small /dev/shm", ("--shm-size", "64k"), run, sums(read_each_other)),
        Check("data workers in it", ("--shm-size", "1m"), "multiring run -n 2 load.py", fails("--shm-size=2g")),
        Check("no ptrace", ("--security-opt", f"seccomp={folder / 'ptrace.json'}"), run, sums(nobody)),
        Check("no memfd_create", ("--security-opt", f"seccomp={folder / 'memfd.json'}"), run, fails("seccomp profile")),
        Check(
            "a memory limit",
            ("--memory", "300m"),
            "multiring run -n 2 eat.py",
            fails("rank 1 (pid", "killed by SIGKILL", "memory of its control group of 300 MiB", code=137),
        ),
        Check(
            "a CPU limit",
            ("--cpus", "1"),
            f"multiring run -n 1 -- python -c {shlex.quote(threads)}",
            lambda done: "threads 1\n" in done.out,
        ),
        Check("a limit of processes", ("--pids-limit", "8"), "multiring run -n 4 sum.py", fails("--pids-limit")),
    ]


class Podman:
    """Runs podman with a storage and settings of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        cache = cache_folder() / "containers"
        cache.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{cache}"\nrunroot = "{folder}/run"\n', encoding="utf-8"
        )
        self.environment = {
            **inherited_environment(),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }
        self.use("runc")

    def use(self, runtime: str) -> None:
        """Use another runtime from now on."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        processes = min(4096, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        folders = ", ".join(f'"{each}:{each}:ro"' for each in folders_of_pip())
        # podman's default limits may be above this machine's, and then the runtime may not set them.
        limits = f'["nofile={min(soft, hard)}:{min(soft, hard)}", "nproc={processes}:{processes}"]'
        (self._folder / "containers.conf").write_text(
            f'[engine]\nruntime = "{runtime}"\n[containers]\ndefault_ulimits = {limits}\nvolumes = [{folders}]\n',
            encoding="utf-8",
        )

    def run(
        self, words: Sequence[str], folder: Path | None = None, timeout_s: float = DEADLINE_S, text: str = ""
    ) -> Done:
        """Run a command, whose words may be podman's, in `folder`, with `text` as its input.

        podman leaves a file in the folder if memory is used up.
        """
        done = subprocess.run(  # noqa: S603 -- the commands are this program's and the page's
            words,
            cwd=folder or self._folder,
            env=self.environment,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Done(done.returncode, done.stdout)

    def search(self, secret: str, *words: str) -> Done:
        """Return where a secret is found on this host: in processes, in podman's own files, /run and /dev/shm.

        Args:
            secret: the secret.
            words: the option `--left` of tests/support/secret_search.py, and the owners of environments.
        """
        cache = cache_folder() / "containers"
        folders = [self._folder, cache / "secrets", cache / "overlay-containers", Path("/dev/shm"), Path("/run")]  # noqa: S108
        command = [sys.executable, secret_search.__file__, "--folders", ",".join(map(str, folders))]
        options, owners = ([word for word in words if (word[0] == "-") == is_option] for is_option in (True, False))
        return self.run([*command, *options, "-", *owners], text=secret)


def make_base(podman: Podman, folder: Path) -> None:
    """Make the base image, and choose a runtime that works here."""
    if podman.run(["podman", "image", "exists", PLAIN]).code != 0:
        file = folder / "base.tar"
        made = podman.run(["mmdebstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(file)])
        require(made, "mmdebstrap")
        require(podman.run(["podman", "import", str(file), PLAIN]), "podman import")
        file.unlink()
    settings = folder / "base"
    settings.mkdir()
    (settings / "pip.conf").write_text(pip_settings(), encoding="utf-8")
    (settings / "constraints.txt").write_text(f"{torch_here()}\n", encoding="utf-8")
    (settings / "Containerfile").write_text(
        f"FROM {PLAIN}\nCOPY pip.conf /etc/pip.conf\nCOPY constraints.txt /etc/pip-constraints.txt\n", encoding="utf-8"
    )
    require(podman.run(["podman", "build", "-t", BASE, str(settings)]), "podman build of the base")
    for runtime in ("crun", "runc"):
        if shutil.which(runtime) is None:
            continue
        podman.use(runtime)
        tried = podman.run(["podman", "run", "--rm", BASE, "true"])
        print(f"{runtime}: {'works' if tried.code == 0 else tried.out.strip()}", flush=True)
        if tried.code == 0:
            return
    raise SystemExit("no container can be started here")


def require(done: Done, what: str) -> None:
    """Exit unless a command succeeded."""
    if done.code != 0:
        raise SystemExit(f"{what} failed with {done.code}:\n{done.out}")


def torch_here() -> str:
    """Return the requirement of torch that the tests use, in its CPU build."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    return f"torch=={pinned[1]}+cpu"


def pip_here(name: str) -> str:
    """Return one of pip's settings on this machine, such as "cert", or an empty text."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    text = found.get(f":env:.{name}", found.get(f"global.{name}", "''"))
    return str(ast.literal_eval(text))


def folders_of_pip() -> list[str]:
    """Return the files and folders of this machine that pip's settings name; every container sees them."""
    words = " ".join(map(pip_here, ("cert", "find-links", "extra-index-url"))).split()
    paths = [word.removeprefix("file://").removesuffix("/simple") for word in words]
    return sorted({path for path in paths if path.startswith("/") and Path(path).exists()})


def pip_settings() -> str:
    """Return pip's settings for the base image.

    PyPI is an additional index, because torch's index on the command line takes the place of the first one. Where that
    index cannot be reached, pip must not try for long.
    """
    indexes = [pip_here("index-url") or "https://pypi.org/simple", *pip_here("extra-index-url").split()]
    lines = ["[global]", f"index-url = {indexes[0]}", f"extra-index-url = {' '.join(indexes)}", "retries = 0"]
    lines += ["timeout = 60", "constraint = /etc/pip-constraints.txt"]
    lines += [f"{name} = {pip_here(name)}" for name in ("cert", "find-links") if pip_here(name)]
    return "\n".join([*lines, ""])


def commands_of_page() -> list[str]:
    """Return the commands of the page's first block."""
    [block, *_] = re.findall(r"^```\n(\$ .*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ") for line in block.splitlines()]


def write_profiles(folder: Path) -> None:
    """Write seccomp profiles: podman's own, but for some system calls, which fail with EPERM."""
    for name, calls in (
        ("ptrace", ["ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"]),
        ("memfd", ["memfd_create"]),
    ):
        profile = json.loads(SECCOMP.read_text(encoding="utf-8"))
        for rule in profile["syscalls"]:
            rule["names"] = [each for each in rule["names"] if each not in calls]
        profile["syscalls"].append({"names": calls, "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "args": []})
        (folder / f"{name}.json").write_text(json.dumps(profile), encoding="utf-8")


class Report:
    """Prints a line for each check, and counts the failures."""

    def __init__(self) -> None:
        self.failed = 0

    def add(self, name: str, done: Done, *, is_right: bool, took_s: float) -> None:
        """Print the outcome of a check, and the output of a failed one."""
        self.failed += not is_right
        print(f"{'ok' if is_right else 'FAILED':7}{took_s:6.1f} s  {name}", flush=True)
        if not is_right:
            print(f"exit code {done.code}\n{done.out}", flush=True)


def run_page(podman: Podman, programs: Path, report: Report) -> None:
    """Run the page's commands as they stand: the first one in this checkout, the others where the programs are."""
    build, *others = commands_of_page()
    began = time.monotonic()
    done = podman.run(["sh", "-c", build], ROOT, BUILD_S)
    report.add(build, done, is_right=done.code == 0, took_s=time.monotonic() - began)
    if done.code:
        return
    wanted = {"--node-rank 1": "rank 3 of 4: loss 0.0", "podman logs": "rank 1 of 4: loss 0.0"}
    for command in others:
        began = time.monotonic()
        done = podman.run(["sh", "-c", command], programs)
        words_wanted = [text for part, text in wanted.items() if part in command]
        if "multiring run -n 2" in command:
            words_wanted.append("rank 1 of 2: loss 0.0")
        is_right = done.code == 0 and all(text in done.out for text in words_wanted)
        report.add(command[:100], done, is_right=is_right, took_s=time.monotonic() - began)


def clean(podman: Podman) -> None:
    """Remove the containers, secrets and networks of the page and of `run_killed`, also those of an earlier run."""
    podman.run(["podman", "rm", "--force", "--ignore", "node0", "node1", "lost0", "lost1"])
    for kind, names in (("secret", ("train-secret", "lost")), ("network", ("train", "lost"))):
        for name in names:
            podman.run(["podman", kind, "rm", name])


def run_killed(podman: Podman, programs: Path, report: Report) -> None:
    """Kill one of two containers: the other must name it and end. Nobody else may read their secret at any time."""
    secret = secrets.token_hex(32)
    require(podman.run(["podman", "network", "create", "lost"]), "podman network create")
    require(podman.run(["podman", "secret", "create", "lost", "-"], text=secret), "podman secret create")
    options = ["--network", "lost", "--secret", "lost", "-e", "MULTIRING_SECRET_FILE=/run/secrets/lost"]
    options += ["-v", f"{programs}:/work:ro", "multiring", "multiring", "run", "--nodes", "2", "--meet", "lost0:29400"]
    options += ["-n", "1"]
    for node in (0, 1):
        run = ["podman", "run", "--detach", "--name", f"lost{node}", *options, "--node-rank", str(node)]
        require(podman.run([*run, "wait.py"]), "podman run")
    until = time.monotonic() + DEADLINE_S
    while any("joined" not in podman.run(["podman", "logs", f"lost{node}"]).out for node in (0, 1)):
        if time.monotonic() >= until:
            break
        time.sleep(0.5)
    began = time.monotonic()
    # The ranks' user is 1000, also on the host.
    shown = podman.search(secret, "1000")
    control = podman.search(secret, "--left", "1000")  # podman's own file, which only root can read
    is_right = shown.out == "[]\n" and "secretsdata" in control.out
    told = Done(shown.code, f"readable by others: {shown.out}, by root: {control.out}")
    report.add("a secret while the ranks run", told, is_right=is_right, took_s=time.monotonic() - began)
    began = time.monotonic()
    require(podman.run(["podman", "kill", "lost1"]), "podman kill")
    waited = podman.run(["podman", "wait", "lost0"])
    took_s = time.monotonic() - began
    told = podman.run(["podman", "logs", "lost0"])
    code = int(waited.out.split()[-1])
    is_right = code != 0 and took_s < LOSS_S and "rank 1" in told.out
    report.add("a killed container", Done(code, told.out), is_right=is_right, took_s=took_s)
    logs = [podman.run(["podman", "logs", f"lost{node}"]).out for node in (0, 1)]
    clean(podman)
    began = time.monotonic()
    left = podman.search(secret, "--left")
    is_right = left.out == "[]\n" and not any(secret in log for log in logs)
    report.add("a secret after the end", left, is_right=is_right, took_s=time.monotonic() - began)


def main() -> int:
    """Build the image and run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only checks with this text in their name")
    options = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root and {', '.join(NEEDED)}: apt-get install {' '.join(NEEDED)} runc netavark aardvark-dns")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        programs = folder / "programs"
        programs.mkdir()
        for script, text in SCRIPTS.items():
            (programs / script).write_text(text, encoding="utf-8")
        write_profiles(folder)
        podman, report = Podman(folder), Report()
        make_base(podman, folder)
        clean(podman)
        if not options.only:
            run_page(podman, programs, report)
            run_killed(podman, programs, report)
        for check in (each for each in checks(folder) if options.only in each.name):
            began = time.monotonic()
            words = ["podman", "run", "--rm", *check.options, "-v", f"{programs}:/work:ro", "multiring"]
            done = podman.run([*words, *shlex.split(check.command)])
            report.add(check.name, done, is_right=check.is_right(done), took_s=time.monotonic() - began)
        print(f"{report.failed} checks failed", flush=True)
        return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
