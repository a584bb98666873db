"""Population based training: states that go from member to member, equal runs, and failures of either side."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

import multiring
from multiring import adapters, trials
from multiring.errors import ArgumentError, PeerLostError

SPACE = {"rate": {"low": 1e-3, "high": 1.0, "log": True}, "kind": ["a", "b"]}
ROUNDS = 6


def trained(here: Here, seed: int, per_member: int) -> Any:
    """Train x towards 3 with each member's rate; return the result, and what each rank saw after each round."""
    here.join()
    seen: list[Any] = []

    def objective(member: trials.PopulationMember) -> None:
        x, lineage = np.zeros(1000), np.zeros(ROUNDS, np.int64)
        for number in range(member.rounds):
            before = dict(member.params)
            for _ in range(5):
                x -= member.params["rate"] * (x - 3)
            lineage[number] = member.number
            loss = float(adapters.allreduce(np.abs(x - 3), name="loss").mean())
            assert multiring.size() == per_member
            copied = member.exchange(loss, {"x": x, "lineage": lineage})
            seen.append((member.number, number, before, loss, copied, lineage.tolist(), float(x[0])))

    found = trials.run_population(objective, SPACE, rounds=ROUNDS, ranks_per_member=per_member, seed=seed)
    assert multiring.size() == here.size
    return found, seen


@pytest.mark.parametrize(("engine", "members", "per_member"), [("shm", 4, 1), ("shm+tcp", 3, 2)])
def test_bad_members_go_on_from_good_ones(engine: str, members: int, per_member: int) -> None:
    results = run_ranks(trained, members * per_member, 3, per_member, engine=engine)
    found = results[0][0]
    assert all(result == found for result, _ in results)
    assert (found.members, found.failures, len(found.rounds)) == (members, {}, members * ROUNDS)
    by_place = {(each.member, each.round): each for each in found.rounds}
    saw = {(member, number): rest for _, seen in results for member, number, *rest in seen}
    copies = 0
    for (member, number), each in by_place.items():
        params, loss, copied, lineage, _ = saw[member, number]
        assert (each.params, each.value, each.source is not None) == (params, loss, copied)
        if each.source is not None:
            copies += 1
            values = {other: by_place[other, number].value for other in range(members)}
            assert values[each.source] == min(values.values())
            assert each.value == max(values.values())
            assert lineage[: number + 1] == saw[each.source, number][3][: number + 1]
            after = by_place[member, number + 1].params["rate"] / by_place[each.source, number].params["rate"]
            assert after != 1.0
    assert 1 <= copies <= ROUNDS - 1
    assert all(each.source is None for each in found.rounds if each.round == ROUNDS - 1)
    best = found.best
    assert best.value == min(by_place[member, ROUNDS - 1].value for member in range(members))
    history = found.history(best.member)
    assert [each.round for each in history] == list(range(ROUNDS))
    assert [each.member for each in history] == saw[best.member, ROUNDS - 1][3]


def test_the_same_seed_gives_the_same_run() -> None:
    found, again, other = (run_ranks(trained, 4, seed, 1)[0][0] for seed in (5, 5, 6))
    assert again == found
    assert other != found


def with_torch(here: Here) -> Any:
    here.join()

    def objective(member: trials.PopulationMember) -> None:
        torch.manual_seed(member.number)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=member.params["rate"])
        for _ in range(member.rounds):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(5, 4)).square().sum().backward()
                optimizer.step()
            # PopulationMember 1 is always worse.
            if member.exchange(float(member.number), {"model": model, "optimizer": optimizer}):
                for group in optimizer.param_groups:
                    group["lr"] = member.params["rate"]
            states.append(
                [each.detach().clone() for each in model.parameters()]
                + [each["exp_avg"].clone() for each in optimizer.state.values()]
            )

    states: list[list[torch.Tensor]] = []
    found = trials.run_population(objective, {"rate": {"low": 0.01, "high": 0.1}}, rounds=3, quantile=0.5)
    return found, [[each.tolist() for each in state] for state in states]


def test_models_and_optimizers_are_copied() -> None:
    (found, good), (_, bad) = run_ranks(with_torch, 2)
    assert [each.source for each in found.rounds if each.member == 1] == [0, 0, None]
    assert good[:2] == bad[:2]
    assert good[2] != bad[2]  # another rate since the last copy


class Broken:
    """A model whose state cannot be taken, or loaded, by one member."""

    def __init__(self, array: Any, *, fails_at: str) -> None:
        self.array, self.fails_at = array, fails_at

    def state_dict(self) -> Any:
        if self.fails_at == "taking":
            raise OSError("the disk is on fire")
        return {"array": self.array}

    def load_state_dict(self, state: Any) -> None:
        if self.fails_at == "loading":
            raise KeyError("layer 3")
        self.array[...] = state["array"]


FAILURES = {
    # which member fails how, and the reasons of the members that fail, by member
    "the source cannot send": {0: ("taking", "OSError: the disk is on fire"), 3: ("", "did not come: ")},
    "the copy does not fit": {3: ("loading", "state['model'] of member 0 (rank 0) does not fit: KeyError: 'layer 3'")},
    "a member raises": {1: ("raises", "ValueError: no such layer")},
    "a member ends early": {2: ("returns", "rank 2 ended after 1 of 3 rounds")},
    "a member calls too often": {2: ("too often", "this is call 4, and the population has 3 rounds")},
    "a value is no number": {1: ("text", "exchange(value='low'): want a number")},
    "a state cannot be copied": {1: ("state", "state['model'] is of type int; want objects with state_dict")},
}


def failing(here: Here, case: str) -> Any:
    here.join()
    kinds = {member: kind for member, (kind, _) in FAILURES[case].items()}

    def objective(member: trials.PopulationMember) -> None:
        kind = kinds.get(member.number, "")
        model = Broken(np.full(3, float(member.number)), fails_at=kind)
        for number in range(member.rounds):
            if number == 1 and kind == "raises":
                raise ValueError("no such layer")
            if number == 1 and kind == "returns":
                return
            value: Any = "low" if kind == "text" else float(member.number)
            member.exchange(value, {"model": 3 if kind == "state" else model})
        if kind == "too often":
            member.exchange(1.0, {"model": model})

    found = trials.run_population(objective, SPACE, rounds=3)
    array = np.ones(3)
    multiring.world().all_reduce(array)
    assert list(array) == [4.0] * 3
    return found


@pytest.mark.parametrize("case", FAILURES)
def test_failures_of_either_side_are_told_and_the_others_go_on(case: str) -> None:
    results = run_ranks(failing, 4, case)
    assert results[1:] == results[:-1]
    found = results[0]
    assert set(found.failures) == set(FAILURES[case])
    for member, (_, reason) in FAILURES[case].items():
        assert reason in found.failures[member]
        assert found.failures[member].startswith(f"rank {member}")
    assert found.best.member not in found.failures
    last = {each.member for each in found.rounds if each.round == 2}
    assert last >= set(range(4)) - set(found.failures)


def dies(here: Here) -> None:
    here.join()

    def objective(member: trials.PopulationMember) -> None:
        for number in range(member.rounds):
            if number == 1 and member.number == 2:
                here.reach("second round")
                multiring.world().barrier()
            member.exchange(float(member.number), {"x": np.zeros(3)})

    trials.run_population(objective, SPACE, rounds=3)


def test_a_rank_that_dies_ends_the_population() -> None:
    report = report_of(dies, 4, faults=[kill(2).at("second round")])
    errors = [report.outcomes[rank].error for rank in (0, 1, 3)]
    assert [type(error) for error in errors] == [PeerLostError] * 3, [repr(error) for error in errors]
    # The others end by their errors, and may be lost before a slow rank hears of the first loss.
    assert all(" is lost: it died" in str(error) for error in errors), errors
    assert any("rank 2 is lost" in str(error) for error in errors), errors


def refused(here: Here) -> list[str]:
    here.join()
    texts = []
    several: list[dict[str, Any]] = [
        {"rounds": 0},
        {"rounds": 2, "ranks_per_member": 3},
        {"rounds": 2, "ranks_per_member": 4},
        {"rounds": 2, "quantile": 0.6},
        {"rounds": 2, "quantile": 0},
        {"rounds": 2, "resample": float("nan")},
        {"rounds": 2, "seed": -1},
        {"rounds": 2, "direction": "down"},
        {"rounds": 2, "sampler": "random"},
        {"rounds": 2, "space": {"rate": {"low": 1, "high": 0}}},
    ]
    for wrong in several:
        with pytest.raises(ArgumentError) as raised:
            trials.run_population(lambda _: None, wrong.pop("space", SPACE), **wrong)
        texts.append(str(raised.value))
    with pytest.raises(ArgumentError, match="objective=3: want a function"):
        trials.run_population(3, SPACE, rounds=1)  # type: ignore[arg-type]
    return texts


def test_arguments_are_refused_on_every_rank() -> None:
    results = run_ranks(refused, 4)
    assert results[1:] == results[:-1]
    for text, told in zip(
        results[0],
        ["rounds=0", "=3: 4 ranks make 1", "=4: 4 ranks make 1", "quantile=0.6", "quantile=0: want a number above 0",
         "resample=nan", "seed=-1", "'down'", "sampler='random'", "'rate'"],
        strict=True,
    ):  # fmt: skip
        assert told in text
