"""Several rails between hosts all carry data; a cut rail is dropped and named; ranks must agree on their rails."""

import json
import os
import re
import sys

import numpy as np
import pytest
from tests.support.lab_rig import LabRun
from tests.support.ranks import Here, report_of, run_ranks

from multiring._runtime.job.job import current
from multiring._runtime.rails.select import Traffic, traffic_of
from multiring.errors import LaunchError
from multiring.lab import ask_lab

TWO = "127.0.0.1,127.0.0.2"


def sum_and_look(here: Here) -> list[Traffic]:
    group = here.join()
    for count in (1, 1000, 1_000_003):
        total = np.arange(count, dtype=np.int64) + here.rank
        group.all_reduce(total)
        assert (total == np.arange(count) * here.size + here.size * (here.size - 1) // 2).all()
    group.barrier()
    found = traffic_of(current().context)
    group.barrier()
    return found


@pytest.mark.parametrize("rails", ["127.0.0.1", TWO, "127.0.0.1:3gbit,127.0.0.2:1gbit,lo:0.5gbit"])
def test_every_rail_carries(rails: str) -> None:
    rails = rails.replace("lo:", "127.0.0.3:")
    for rank, found in enumerate(run_ranks(sum_and_look, 3, engine="tcp", rails=rails)):
        for number in range(rails.count(",") + 1):
            own = [row for row in found if row.rail == number]
            assert all(row.is_up and row.peer != rank for row in own)
            assert sum(row.acknowledged_bytes for row in own) > 100_000


def join(here: Here) -> None:
    here.join()


@pytest.mark.parametrize(
    ("rails", "words"),
    [
        ("nothing9,lo", "MULTIRING_RAILS='nothing9': No such device; interfaces here: .*lo"),
        ("192.0.2.77,lo", "MULTIRING_RAILS='192.0.2.77': Cannot assign requested address; interfaces here: .*lo"),
        ("127.0.0.1,lo", "MULTIRING_RAILS names an address twice: 127.0.0.1 .127.0.0.1., lo .127.0.0.1."),
    ],
)
def test_rails_that_are_not_there(rails: str, words: str) -> None:
    report = report_of(join, 2, engine="tcp", rails=rails)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, LaunchError)
        assert re.match(words, str(outcome.error))


def test_ranks_with_different_rails_say_who_has_what() -> None:
    report = report_of(join, 3, engine="tcp", by_rank=[{"rails": TWO}, {"rails": "127.0.0.1"}, {"rails": TWO}])
    words = (
        r"all ranks must have equally many rails, but there are 2 \(127.0.0.1, 127.0.0.2\) on ranks \[0, 2\]; "
        r"1 \(127.0.0.1\) on ranks \[1\]; set MULTIRING_RAILS to match"
    )
    for outcome in report.outcomes:
        assert isinstance(outcome.error, LaunchError)
        assert re.match(words, str(outcome.error))


# Ranks sum until every rank has seen the loss of the rail. The loop uses no clock.
UNTIL_CUT = """
import json, logging
import numpy as np
import multiring
logging.basicConfig(level=logging.WARNING)
group = multiring.init()
lost, turn = [], 0
print("up", flush=True)
while True:
    total = np.full(500_000, group.rank + turn, np.int64)
    group.all_reduce(total)
    assert (total == 3 + 3 * turn).all()
    lost += [(event.name, event.peer) for event in multiring.drain_events() if event.kind == "rail"]
    seen = np.array([len(lost)], np.int64)
    group.all_reduce(seen, op="min")
    turn += 1
    if seen[0] > 0:
        break
print(json.dumps(sorted(lost)), flush=True)
multiring.shutdown()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
@pytest.mark.parametrize("rail", [0, 1])
def test_a_job_goes_on_when_a_rail_is_cut(rail: int) -> None:
    name = f"rails-{os.getpid()}-{rail}"
    wires = ("--hosts", "3", "--link", "500mbit", "--rail", "500mbit", "--name", name)
    lab = LabRun(*wires, sys.executable, "-c", UNTIL_CUT, MULTIRING_RAIL_TIMEOUT_S="0.5")
    try:
        lab.wait_for_lines(3)
        ask_lab(name, fault=["cut", "host1", f"rail{rail}"])
        assert lab.finish() == 0, lab.err
    finally:
        lab.close()
    found = {line[1]: json.loads(line[4:]) for line in lab.out.splitlines() if line[4:5] == "["}
    assert all([f"rail {rail}", 1] in found[other] for other in "02")
    assert {name for rows in found.values() for name, _ in rows} == {f"rail {rail}"}
    said = rf"rank 0: rail {rail} \(rail{rail}, 10.77.{rail}.1\) to host 1 \(rank 1, 10.77.{rail}.2\) is given up"
    assert re.search(said, lab.err)
