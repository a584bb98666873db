"""Random programs of collectives, checked against NumPy on every rank.

A program depends on its seed alone, so every rank knows its operations, groups and data. Each rank also has its own
random generator for choices that ranks need not agree on: the location of its arrays, whether it waits at once, the
order in which it posts operations of different groups, and delays.

    multiring run -n 3 -- python -m tests.support.programs --seed 7 --turns 20

runs one program on the ranks of any launcher. The same seed with the same number of ranks, hosts and rails gives the
same program. Timing and each rank's own choices vary.
"""

import argparse
import itertools
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tests.support.acts import ACTS, Act, Team
from tests.support.steps import Dice, Step, draw

import multiring
from multiring._collectives import algorithms_of, build
from multiring._runtime.group.compile import Request, task_of
from multiring._schedule import Collective, Frame, wire_of
from multiring._topology import grid_of
from multiring.errors import MultiringError, ScheduleError
from multiring.planner import Plan
from multiring.planner.candidates import joined_frames, wires_of

IN_FLIGHT = 12
MOST_TEAMS = 6
MAKE_A_GROUP = "make a group"
KINDS = {
    "all_reduce": 8,
    "broadcast": 3,
    "reduce_scatter": 3,
    "all_gather": 3,
    "all_to_all": 3,
    "message": 4,
    "barrier": 1,
    "repeat": 2,
    "disagree": 1,
    MAKE_A_GROUP: 1,
}
UNORDERED = {kind: weight for kind, weight in KINDS.items() if kind not in (MAKE_A_GROUP, "repeat")}
PINNED = {"all_reduce": Collective.ALL_REDUCE, "broadcast": Collective.BROADCAST}
SHARES = ((1,), (1, 1), (3, 1, 2), (1, 1, 1, 1))


class Program:
    """One rank's run of the program of a seed, on its own twin of the world group."""

    def __init__(self, world: multiring.Group, seed: int) -> None:
        self._seed = seed
        self._rank = world.rank
        self._own = np.random.default_rng([seed, 3, world.rank])
        self._numbers = itertools.count()
        self._teams = [Team(next(self._numbers), tuple(range(world.size)), world)]
        self._compared: dict[int, Team] = {}  # groups with replicas to compare, including groups that were dropped
        self.steps = 0

    def run(self, turn: int) -> None:
        """Run the operations of one turn: about ten to fifty.

        Raises:
            AssertionError: a check failed; the text names the seed and the step.
        """
        dice = np.random.default_rng([self._seed, 4, turn])
        for _ in range(int(dice.integers(1, 4))):
            if dice.random() < 0.6:
                self._in_order(dice, int(dice.integers(5, 20)))
            else:
                self._shuffled(dice, int(dice.integers(2, IN_FLIGHT + 1)))
            self._compare_replicas()

    # ---- order of operations ----

    def _in_order(self, dice: Dice, count: int) -> None:
        """Start all operations in the same order on every rank. Wait for each at once or some time later."""
        pending: list[tuple[Act, Any]] = []
        for _ in range(count):
            step = draw(dice, next(self._numbers), len(self._teams), KINDS)
            if step.kind == MAKE_A_GROUP:
                self._make_group(step)
                continue
            pins = dice.random() < 0.25
            act = self._act(step)
            if act is None:
                continue
            with _saying(self._seed, step):
                if pins and step.kind in PINNED:
                    self._pin(step)
                if self._own.random() < 0.5:
                    self._finish(act, partial(act.start, waits=True))
                else:
                    pending.append((act, act.start(waits=False)))
                    if len(pending) == IN_FLIGHT or self._own.random() < 0.2:
                        self._wait(pending.pop(int(self._own.integers(len(pending)))))
        self._own.shuffle(pending)
        for each in pending:
            self._wait(each)

    def _shuffled(self, dice: Dice, count: int) -> None:
        """Start all operations before waiting for any. Each rank chooses its own order between groups."""
        steps = [draw(dice, next(self._numbers), len(self._teams), UNORDERED) for _ in range(count)]
        lines: dict[tuple[object, ...], list[Act]] = {}
        for act in filter(None, map(self._act, steps)):
            lines.setdefault((act.step.team, *act.line), []).append(act)
        pending = []
        while lines:
            line = list(lines)[int(self._own.integers(len(lines)))]
            act = lines[line].pop(0)
            if not lines[line]:
                del lines[line]
            with _saying(self._seed, act.step):
                pending.append((act, act.start(waits=False)))
        self._own.shuffle(pending)
        for each in pending:
            self._wait(each)

    def _wait(self, pending: tuple[Act, Any]) -> None:
        act, handle = pending
        with _saying(self._seed, act.step):
            self._finish(act, handle.wait)

    def _finish(self, act: Act, ends: Callable[[], Any]) -> None:
        if self._own.random() < 0.05:
            time.sleep(self._own.uniform(0, 0.003))
        raised: MultiringError | None = None
        result = None
        try:
            result = ends()
        except MultiringError as error:
            raised = error
        if raised is not None and (act.refusal is None or not isinstance(raised, act.refusal)):
            raise raised
        assert raised is not None or act.refusal is None, "it succeeded although the ranks' arguments differ"
        act.check(result)
        if act.step.kind == "all_reduce":
            team = act.team
            self._compared[team.number] = team
        self.steps += 1

    def _compare_replicas(self) -> None:
        """Raise AssertionError if the members of a group hold different bits in results that must be equal."""
        for _, team in sorted(self._compared.items()):
            group, found = team.member(), team.replicas
            own = np.array([[step, int.from_bytes(found[step], "little")] for step in sorted(found)], np.uint64)
            every = group.all_gather(own.reshape(1, -1))
            for rank in range(group.size):
                differ = np.flatnonzero(every[rank].reshape(own.shape) != own)
                where = f"program of seed {self._seed}: rank {rank} of {group} has other bits in step"
                assert not differ.size, f"{where} {own[differ[0] // 2, 0]}"
            found.clear()
        self._compared.clear()

    def _act(self, step: Step) -> Act | None:
        """Return this rank's act for a step, or None if the rank is not a member of the step's group."""
        team = self._teams[step.team]
        return None if team.group is None else ACTS[step.kind](step, team, self._own)

    # ---- plans and groups ----

    def _pin(self, step: Step) -> None:
        """Pin a random valid schedule for a step, with random channels and segments."""
        group, collective, dice = self._teams[step.team].member(), PINNED[step.kind], step.dice()
        dice.permutation(len(step.shape))  # draw the order of the strides, which is not needed here
        root = int(dice.integers(group.size)) if collective is Collective.BROADCAST else 0
        count, topology = math.prod(step.shape), group.topology
        op = step.op if collective is Collective.ALL_REDUCE else "sum"
        task = task_of(Request(collective, step.dtype, count, count, op, root, wire=wire_of(step.wire)))
        laid, order = grid_of(topology)
        grids = [(group.size,), laid, *([(2, group.size // 2)] if group.size % 2 == 0 else [])]
        grid = grids[int(dice.integers(len(grids)))]
        frames = [Frame(collective=collective, grid=grid, order=order, root=root)]
        frames += joined_frames(topology) if collective is Collective.ALL_REDUCE else []
        frame = frames[int(dice.integers(len(frames)))]
        shares = SHARES[int(dice.integers(len(SHARES)))]
        cuts = [None, max(64, task.size_bytes // int(dice.integers(2, 40)))]
        algorithm = str(dice.choice(algorithms_of(collective)))
        wires = wires_of(frame.grid, frame.order, topology, task.wire)
        try:
            schedule = build(algorithm, replace(frame, shares=shares, wires=wires), task.accumulation)
            group.pin(task, Plan(schedule, "pinned", 1.0, cuts[int(dice.integers(2))]))
        except ScheduleError:  # the algorithm does not support this accumulation, grid or wire
            return

    def _make_group(self, step: Step) -> None:
        dice, team = step.dice(), self._teams[step.team]
        if len(self._teams) == MOST_TEAMS:
            del self._teams[int(dice.integers(1, MOST_TEAMS))]
            return
        how = str(dice.choice(["part", "named", "twin", "for"]))
        chosen = dice.permutation(len(team.ranks))[: int(dice.integers(1, len(team.ranks) + 1))].tolist()
        ranks, group = tuple(team.ranks[rank] for rank in chosen), None
        if how in ("twin", "for"):
            ranks = team.ranks
        if team.group is not None:
            if how == "part":
                group = team.group.subgroup(chosen)
            elif how == "named" and self._rank in ranks:
                group = team.group.subgroup_named(chosen, f"step {step.number}")
            elif how == "twin":
                group = team.group.twin()
            elif how == "for":
                group = team.group.twin_for(f"step {step.number}")
        assert (group is not None) == (self._rank in ranks)
        self._teams.append(Team(step.number, ranks, group))


@contextmanager
def _saying(seed: int, step: Step) -> Iterator[None]:
    """Add the seed and the step to any exception raised in the block."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"program of seed {seed}, {step}: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class Ran:
    """The counts and errors of a run."""

    turns: int = 0
    steps: int = 0
    errors: list[BaseException] = field(default_factory=list)


def run(world: multiring.Group, seed: int, *, turns: int | None = None, first: int = 0, seconds: float = 0.0) -> Ran:
    """Run the program of `seed` for `turns` turns from number `first` on, or for `seconds`.

    Every fourth turn runs two programs in two threads.
    """
    ran, begin = Ran(), time.monotonic()
    control = world.twin()
    programs = [Program(world.twin(), seed * 2 + which) for which in range(2)]
    for turn in range(1 << 30) if turns is None else range(first, first + turns):
        if turns is None:
            goes_on = np.array([time.monotonic() - begin < seconds])
            control.all_reduce(goes_on, "min")
            if not goes_on[0]:
                break
        busy = programs if turn % 4 == 3 else programs[:1]
        threads = [threading.Thread(target=_run, args=(program, turn, ran.errors), daemon=True) for program in busy[1:]]
        for thread in threads:
            thread.start()
        busy[0].run(turn)
        for thread in threads:
            thread.join()
        for error in ran.errors:
            raise error
        ran.turns += 1
    ran.steps = sum(program.steps for program in programs)
    control.barrier()
    return ran


def _run(program: Program, turn: int, errors: list[BaseException]) -> None:
    try:
        program.run(turn)
    except BaseException as error:  # noqa: BLE001 -- raised again by the thread that started this one
        traceback.print_exc()  # print at once: the other thread may wait for ranks that this error ends
        errors.append(error)


def main() -> None:
    """Run a program on the ranks that a launcher started; rank 0 prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which program")
    parser.add_argument("--turns", type=int, help="how many turns")
    parser.add_argument("--first", type=int, default=0, help="the number of the first turn, where turns are given")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long, where no turns are given")
    arguments = parser.parse_args()
    world = multiring.init()
    ran = run(world, arguments.seed, turns=arguments.turns, first=arguments.first, seconds=arguments.seconds)
    if world.rank == 0:
        sys.stdout.write(f"seed {arguments.seed}: {ran.turns} turns, {ran.steps} operations of rank 0, all right\n")
    multiring.shutdown()


if __name__ == "__main__":
    main()
