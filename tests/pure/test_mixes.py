"""Combinations of parallel axes are forecast from a profile and a topology; the cheapest that fits is chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._topology import TCP, Rack, Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism import (
    Axis,
    Compute,
    Overheads,
    Parallelism,
    Profile,
    Seconds,
    StageTime,
    Unit,
    chosen,
    forecast,
    forecasts,
    gathered_together,
    makespan,
    memory_of,
    parallelism_of,
    parallelisms_of,
    seconds_of,
    stages_of,
    table,
)

MIB = 1 << 20
SLOW = replace(TCP, bandwidth_bytes_per_s=12e6)
TWO_BY_TWO = Topology(((0, 1), (2, 3)), rails=(SLOW,))
ONE_HOST = Topology(((0, 1, 2, 3),))
COMPUTE = (Compute(2, 0.01, 0.02), Compute(8, 0.04, 0.08), Compute(16, 0.08, 0.16))


def _unit(**changes: Any) -> Unit:
    unit = Unit(name="0", parameters=2, parameter_bytes=MIB, seconds=1.0, output_bytes=1e4, saved_bytes=4e4)
    return replace(unit, **changes)


def _profile(*units: Unit, **changes: Any) -> Profile:
    return Profile(**{"units": units or (_unit(),) * 8, "batch": 16, "compute": COMPUTE, "divisor": 64, **changes})


WIDE = _unit(parameter_bytes=32 * MIB, split_parameters=2, split_bytes=32 * MIB, split_seconds=1.0, sums=(1e3,) * 2)


def _named(mesh: dict[str, int], profile: Profile, topology: Topology = TWO_BY_TWO) -> Any:
    return forecast(parallelism_of(mesh), profile, topology)


def test_axes_are_those_that_ranks_batch_and_model_allow() -> None:
    names = {
        str(replace(parallelism, microbatches=1)).split(",")[0] for parallelism in parallelisms_of(_profile(), ONE_HOST)
    }
    assert names == {
        "data 4", "shard 4", "data 2 x shard 2", "tensor 4", "data 2 x tensor 2", "pipeline 4", "data 2 x pipeline 2",
    }  # fmt: skip
    assert {parallelism.axes for parallelism in parallelisms_of(_profile(), Topology(((0,),)))} == {((Axis.DATA, 1),)}
    assert not parallelisms_of(_profile(batch=6, divisor=9), ONE_HOST)
    few = parallelisms_of(_profile(_unit(), _unit(), refused={"tensor": "nothing large"}), ONE_HOST)
    assert {axis for parallelism in few for axis, size in parallelism.axes if axis is Axis.TENSOR or size == 4} == {
        Axis.DATA,
        Axis.SHARD,
    }


def test_a_mix_is_laid_both_ways_where_hosts_differ() -> None:
    laid = {
        str(parallelism)
        for parallelism in parallelisms_of(_profile(), TWO_BY_TWO)
        if parallelism.size(Axis.TENSOR) == 2
    }
    assert laid == {"data 2 x tensor 2", "tensor 2 x data 2"}
    assert Parallelism(((Axis.DATA, 2), (Axis.TENSOR, 2))).lines(Axis.TENSOR, (0, 2, 1, 3)) == [(0, 2), (1, 3)]
    assert Parallelism(((Axis.DATA, 2), (Axis.TENSOR, 2))).lines(Axis.DATA, (0, 2, 1, 3)) == [(0, 1), (2, 3)]


def test_the_busiest_axis_lies_on_the_fastest_links() -> None:
    profile = _profile(WIDE, WIDE)
    few_samples = _named({"data": 2, "tensor": 2}, profile)
    assert few_samples.parallelism.axes[-1][0] is Axis.DATA  # 64 MiB of gradients against kilobytes of samples
    many = _profile(replace(WIDE, parameter_bytes=1000, split_bytes=1000, sums=(1e7,)))
    assert _named({"data": 2, "tensor": 2}, many).parallelism.axes[-1][0] is Axis.TENSOR
    assert _named({"data": 2, "shard": 2}, _profile()).parallelism.axes[-1][0] is Axis.SHARD
    assert _named({"data": 2, "pipeline": 2}, _profile()).parallelism.axes[-1][0] is Axis.DATA


def test_small_samples_and_large_layers_are_divided_and_the_other_way_round_replicated() -> None:
    assert chosen(forecasts(_profile(WIDE, WIDE), TWO_BY_TWO)).parallelism.size(Axis.TENSOR) > 1
    small = _profile(*(_unit(saved_bytes=1e6, output_bytes=1e6),) * 8, refused={"tensor": "no"})
    assert chosen(forecasts(small, TWO_BY_TWO)).parallelism.axes == ((Axis.DATA, 4),)


def test_memory_decides_where_it_is_short() -> None:
    profile = _profile(refused={"tensor": "no", "pipeline": "no"})
    whole = 4 * 8 * MIB
    assert memory_of(Parallelism(((Axis.DATA, 4),)), profile).states == whole
    assert memory_of(Parallelism(((Axis.SHARD, 4),)), profile).states == whole / 4
    assert memory_of(Parallelism(((Axis.DATA, 2), (Axis.SHARD, 2))), profile).states == whole / 2
    assert memory_of(Parallelism(((Axis.SHARD, 4),)), profile).gathered == 3 * MIB
    divided = _profile(replace(WIDE, parameter_bytes=40 * MIB))
    assert memory_of(Parallelism(((Axis.TENSOR, 4),)), divided).states == 4 * (8 + 32 / 4) * MIB
    staged = memory_of(Parallelism(((Axis.PIPELINE, 4),), microbatches=8), _profile())
    assert (staged.states, staged.activations) == (whole / 4, 2 * 4e4 * 16 / 8 * 4)
    limit = 20.0 * MIB
    found = forecasts(profile, TWO_BY_TWO, limit)
    assert [each.fits for each in found] == [True, False, False]
    assert chosen(found, limit).parallelism.axes == ((Axis.SHARD, 4),)
    with pytest.raises(ArgumentError, match="no mix fits into a rank's memory of 1 MiB: the smallest, shard 4, needs"):
        chosen(forecasts(profile, TWO_BY_TWO, MIB), MIB)


def test_lines_that_leave_a_host_share_its_rails() -> None:
    profile = _profile(WIDE, refused={"pipeline": "no"})
    near = seconds_of(Parallelism(((Axis.TENSOR, 2), (Axis.DATA, 2))), profile, TWO_BY_TWO)
    far = seconds_of(Parallelism(((Axis.DATA, 2), (Axis.TENSOR, 2))), profile, TWO_BY_TWO)
    # 16 MiB on each of two lines: over 12 MB/s if both leave the host, over shared memory if neither does.
    assert far.exchange > 2 * 16 * MIB / 12e6 > 10 * near.exchange
    racks = (Rack(hosts=(0,), uplinks=(SLOW,)), Rack(hosts=(1,), uplinks=(SLOW,)))
    uplinks = seconds_of(
        Parallelism(((Axis.DATA, 2), (Axis.TENSOR, 2))), profile, replace(TWO_BY_TWO, rails=(TCP,), racks=racks)
    )
    assert uplinks.exchange > 2 * 16 * MIB / 12e6


def test_what_backward_hides_costs_nothing() -> None:
    units = tuple(_unit(parameter_bytes=2 * MIB) for _ in range(8))
    shown = seconds_of(Parallelism(((Axis.DATA, 4),)), _profile(*units), TWO_BY_TWO).exchange
    slower = (Compute(4, 10.0, 20.0),)
    hidden = seconds_of(Parallelism(((Axis.DATA, 4),)), _profile(*units, compute=slower), TWO_BY_TWO).exchange
    assert 0 < hidden < shown  # the last bucket is never hidden
    assert seconds_of(Parallelism(((Axis.DATA, 1),)), _profile(), Topology(((0,),))).exchange == 0


@pytest.mark.parametrize(("longer", "stages"), [(1.04, 1), (1.06, 4)])
def test_of_forecasts_that_are_alike_the_one_with_fewer_stages_is_taken(longer: float, stages: int) -> None:
    found = forecasts(_profile(), ONE_HOST)
    piped = next(each for each in found if each.parallelism.axes == ((Axis.PIPELINE, 4),))
    plain = next(each for each in found if each.parallelism.axes == ((Axis.DATA, 4),))
    slower = replace(plain, seconds=Seconds(compute=longer * piped.seconds.total, exchange=0.0, update=0.0))
    assert chosen([slower, piped]).parallelism.size(Axis.PIPELINE) == stages
    assert chosen([piped, replace(slower, fits=False)]).parallelism == piped.parallelism


def test_stages_that_wait_leave_their_cores_to_others() -> None:
    parallelism = Parallelism(((Axis.PIPELINE, 4),), microbatches=8)
    own_cores = seconds_of(parallelism, _profile(), ONE_HOST).compute
    shared_cores = seconds_of(parallelism, _profile(crowding=2.0), ONE_HOST).compute
    turn = COMPUTE[0].seconds
    assert own_cores == pytest.approx((7 / 4 + 1) * turn)
    # Four stages on two cores. While the pipeline fills and drains, one core waits for a forward and a backward step.
    assert 8 * turn / 4 < shared_cores < 8 * turn / 4 + turn / 4


EVEN = StageTime(1.0, 2.0)


@pytest.mark.parametrize(
    ("stages", "microbatches", "cores", "messages_s", "wanted_s"),
    [
        ([EVEN], 3, 1.0, [], 9.0),
        ([EVEN], 3, 0.5, [], 18.0),
        ([EVEN, EVEN], 1, 2.0, [0.0], 6.0),
        ([EVEN, EVEN], 1, 2.0, [0.25], 6.5),  # both directions
        ([EVEN, EVEN], 4, 2.0, [0.0], 15.0),  # three turns follow one pass through both stages
        ([EVEN, EVEN], 4, 1.0, [0.0], 24.0),  # all the work on one core
        (
            [StageTime(2.0, 4.0), EVEN],
            4,
            2.0,
            [0.0],
            25.0,
        ),  # the slower stage's work, plus one wait for the other stage
        ([EVEN] * 4, 8, 4.0, [0.0] * 3, 33.0),
    ],
)
def test_pipelines_by_hand(
    stages: list[StageTime], microbatches: int, cores: float, messages_s: list[float], wanted_s: float
) -> None:
    assert makespan(stages, microbatches, cores, messages_s) == pytest.approx(wanted_s)


@given(
    stages=st.lists(st.builds(StageTime, st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=5),
    microbatches=st.integers(1, 7),
    cores=st.floats(0.3, 6),
    message_s=st.floats(0, 1),
)
def test_pipelines_take_no_less_than_work_and_way_and_no_more_than_both(
    stages: list[StageTime], microbatches: int, cores: float, message_s: float
) -> None:
    found_s = makespan(stages, microbatches, cores, [message_s] * (len(stages) - 1))
    each = [stage.forward_s + stage.backward_s for stage in stages]
    pace = min(1.0, cores)
    way_s = sum(each) / pace + 2 * (len(stages) - 1) * message_s
    assert found_s >= max(microbatches * sum(each) / cores, microbatches * max(each)) - 1e-6
    assert found_s >= sum(each) + 2 * (len(stages) - 1) * message_s - 1e-6
    assert found_s <= microbatches * way_s + 1e-6


def test_overheads_are_counted_where_they_arise() -> None:
    costs = Overheads(
        update_s_per_byte=1e-9, update_s_per_divided_byte=2e-9, update_s_per_parameter=1e-5, update_s_per_dtensor=1e-4,
        sharded_unit_s=1e-3,
        split_module_s=1e-3, collective_s=1e-3, microbatch_s=1e-3, copy_s_per_byte=1e-10,
    )  # fmt: skip
    profile = _profile(WIDE, _unit())
    for mesh, update in (
        ({"data": 4}, 33 * MIB * 1e-9 + 4e-5),
        ({"shard": 4}, 33 * MIB / 4 * 2e-9 + 4e-4),
        ({"tensor": 4}, MIB * 1e-9 + 8 * MIB * 2e-9 + 2e-5 + 2e-4),
    ):
        free = _named(mesh, profile).seconds
        dear = _named(mesh, replace(profile, overheads=costs)).seconds
        assert free.update == 0
        assert dear.update == pytest.approx(update)
        assert dear.exchange > free.exchange or mesh == {"data": 4}
    assert _named({"pipeline": 2, "data": 2}, replace(profile, overheads=costs)).seconds.compute > 2e-3


def test_measurements_are_joined_by_straight_lines() -> None:
    profile = _profile()
    assert profile.compute_of(4).forward_s == pytest.approx(0.02)
    assert profile.compute_of(32).seconds == pytest.approx(0.48)
    assert profile.compute_of(1) == COMPUTE[0]
    assert _profile(compute=COMPUTE[:1]).compute_of(8).seconds == pytest.approx(0.12)


def test_what_is_small_is_gathered_with_the_rest() -> None:
    units = (_unit(parameter_bytes=100), _unit(), _unit(parameter_bytes=5), _unit())
    assert gathered_together(units) == ((0, 2), (1,), (3,))


def test_no_stage_is_without_parameters() -> None:
    bare = _unit(parameter_bytes=0, seconds=5.0)
    assert stages_of((_unit(), bare, bare, _unit(), bare), 2) in {(range(2), range(2, 5)), (range(3), range(3, 5))}
    with pytest.raises(ArgumentError, match="2 stages of 2 units: want a unit with parameters for each stage"):
        stages_of((_unit(), bare), 2)


def _cuts(count: int, stages: int, begin: int = 0) -> Iterator[list[range]]:
    if stages == 1:
        yield [range(begin, count)]
        return
    for end in range(begin + 1, count - stages + 2):
        for rest in _cuts(count, stages - 1, end):
            yield [range(begin, end), *rest]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_slowest_stage_takes_as_little_as_can_be(seconds: list[int], stages: int) -> None:
    if stages > len(seconds):
        return
    units = tuple(_unit(seconds=float(each)) for each in seconds)
    found = stages_of(units, stages)
    assert [index for stage in found for index in stage] == list(range(len(units)))
    assert len(found) == stages
    assert all(found)

    def slowest(cut: Sequence[range]) -> int:
        return max(sum(seconds[index] for index in stage) for stage in cut)

    assert slowest(found) == min(map(slowest, _cuts(len(units), stages)))


def test_the_table_marks_what_is_taken_and_says_what_cannot_be() -> None:
    profile = _profile(refused={"tensor": "no layer is large enough"})
    found = forecasts(profile, TWO_BY_TWO, 20.0 * MIB)
    text = table(found, found[0].parallelism, profile, TWO_BY_TWO)
    assert "2 hosts x 2 ranks, 1 rail; a step of 16 samples, 8.0 MiB of parameters" in text
    assert f"\n> {found[0].parallelism}" in text
    assert "too much" in text
    assert "no tensor axis: no layer is large enough" in text
    assert [each.seconds.total for each in found if each.fits] == sorted(e.seconds.total for e in found if e.fits)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"rows": 4}, "want data, shard, tensor, pipeline"),
        ({"data": 0}, "each with its number of ranks"),
        ({"shard": 2, "tensor": 2}, "not built together; want one of: data; shard; data and shard"),
        ({"data": 8}, "data 8: is for 8 ranks, but there are 4"),
        ({"tensor": 4}, "no tensor axis: nothing large"),
        ({"pipeline": 4}, "3 units with parameters are fewer than 4 stages"),
        ({"data": 4}, "6 samples cannot be cut into 4 equal parts"),
        ({"data": 2, "pipeline": 2}, "3 samples cannot be cut into 2 microbatches"),
    ],
)
def test_a_mix_that_cannot_be_had_is_refused(mesh: dict[str, int], words: str) -> None:
    profile = _profile(_unit(), _unit(), _unit(), batch=6, refused={"tensor": "nothing large"})
    with pytest.raises(ArgumentError, match=words):
        _named(mesh, profile)


def test_layers_that_ranks_cannot_divide_are_no_tensor_axis() -> None:
    with pytest.raises(ArgumentError, match="layers have 6 features, which 4 ranks cannot divide"):
        _named({"tensor": 4}, _profile(divisor=6))


def test_a_profile_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="0 units, a batch of 16, 3 measurements"):
        Profile(units=(), batch=16, compute=COMPUTE)
