"""`multiring plan` without a job: its output, its files and its errors; and the probe's report of its measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from multiring._cli import main
from multiring._probe.measure import _rounds
from multiring._probe.remarks import far_from_stated, median_of, racked, slow_hosts
from multiring._topology import TCP, DeviceCosts, HostDevices, OwnRails, Rack, Topology, text_of
from multiring.planner import pins_of

LAB = ["plan", "--hosts", "4", "--slots", "2", "--link", "1gbit"]


def test_candidates_come_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAB, "--sizes", "4KiB,32MiB", "--top", "30"]) == 0
    small, large = capsys.readouterr().out.split("\n\n")
    assert small.lstrip().startswith("all_reduce of 4 KiB on 8 ranks\n")
    assert large.startswith("all_reduce of 32 MiB on 8 ranks, the first 30 of ")
    for table in (small, large):
        head, *rows = table.strip().splitlines()[1:]
        assert head.split() == ["predicted", "ms", "algorithm", "grid", "segments", "channels", "engine"]
        times = [float(row.split()[0]) for row in rows]
        assert times == sorted(times)
        assert len(rows) == (30 if table is large else len(rows))
    assert " 2 x 4 " in large.splitlines()[2]


def test_coded_plans_are_shorter_and_on_axes_that_cross_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    first = {}
    for wire in ([], ["--wire", "bf16"], ["--wire", "int8"]):
        assert main([*LAB, "--sizes", "32MiB", "--top", "1", *wire]) == 0
        time, algorithm, *_ = capsys.readouterr().out.splitlines()[-1].split()
        first[wire[-1] if wire else "float32"] = float(time)
        assert algorithm == "direct" or not wire
    assert first["float32"] > 1.8 * first["bf16"] > 1.8 * 1.8 * first["int8"]


def test_a_cluster_on_paper_has_none_of_the_labs_limits(capsys: pytest.CaptureFixture[str]) -> None:
    # 760 hosts are more than the addresses of a lab's rail, and its token buckets end at 34 Gbit/s.
    assert main(["plan", "--hosts", "760", "--slots", "6", "--link", "400gbit", "--sizes", "8MiB", "--top", "2"]) == 0
    assert "all_reduce of 8 MiB on 4560 ranks, the first 2 of " in capsys.readouterr().out


def test_plans_are_saved_for_the_hosts_described(tmp_path: Path) -> None:
    lab = ["--rail", "250mbit", "--rack", "2", "--uplink", "500mbit"]
    assert main([*LAB, *lab, "--sizes", "64KiB,8MiB", "--save", str(tmp_path / "p.toml")]) == 0
    pins = pins_of((tmp_path / "p.toml").read_text())
    assert [task.size_bytes for task, _ in pins.plans] == [65536, 8 << 20]
    assert pins.plans[1][1].schedule.frame.channels == 2


def test_a_topology_file_has_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text_of(Topology(((0,), (1,), (2,)))))
    assert main(["plan", "broadcast", "--topology", str(path), "--slots", "4", "--sizes", "1MiB"]) == 0
    assert "broadcast of 1 MiB on 12 ranks" in capsys.readouterr().out


def test_ways_of_device_tensors_come_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAB, "--device", "cuda", "--device-link", "nvlink", "--sizes", "1KiB,64MiB"]) == 0
    small, large, notes = capsys.readouterr().out.strip().split("\n\n")
    assert small.startswith("all_reduce of 1 KiB of device tensors on 8 ranks\n")
    for table in (small, large):
        head, *rows, taken = table.splitlines()[1:]
        assert head.split() == ["predicted", "ms", "way", "steps", "in", "ms"]
        times = [float(row.split()[0]) for row in rows]
        assert times == sorted(times)
        assert {row.split()[1] for row in rows} == {"staged", "hierarchical", "nccl"}
        assert "(the usual way, because costs are not measured)" in taken
        for row in rows:  # the steps add up
            steps = row.split(maxsplit=2)[2].partition(" (")[0].split(", ")
            assert sum(float(step.split()[-1]) for step in steps) == pytest.approx(float(row.split()[0]), rel=0.02)
    assert "auto takes: staged" in small
    assert "auto takes: hierarchical" in large
    assert "Assumed" not in notes
    assert notes.startswith("Defaults, not measured: to_host_mbit_per_s, ")
    assert "a named lowering, and none of the proven schedules" in notes
    assert "verified on stand-ins only" in notes


def test_measured_costs_of_a_file_choose_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.toml"
    costs = DeviceCosts(
        copy_latency_s=1e-5,
        to_host_bytes_per_s=1e9,
        to_device_bytes_per_s=1e9,
        nccl_latency_s=1e-5,
        nccl_bytes_per_s=1e11,
    )
    devices = (HostDevices(host=0, kinds=("a", "b")),)
    for slow, way in ((1.0, "nccl"), (1e6, "staged")):
        found = replace(costs, nccl_latency_s=costs.nccl_latency_s * slow)  # type: ignore[operator]
        path.write_text(text_of(Topology(((0, 1),), names=("h",), devices=devices, device_costs=found)))
        assert main(["plan", "--device", "cuda", "--topology", str(path), "--sizes", "1MiB"]) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[3].split()[1] == way
        assert f"auto takes: {way} (by measured costs)" in said
        assert "Defaults" not in said
        assert "Not hierarchical: all ranks are on one host." in said


def test_a_device_for_each_rank_is_assumed_outside_a_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, ranks in ((HostDevices(host=0, kinds=("x",) * 8, used=(0,)), 8), (None, 2)):
        known = Topology(((0,),), devices=() if found is None else (found,))
        monkeypatch.setattr("multiring._cli.plan.with_devices", lambda _group, known=known: known)
        monkeypatch.setattr("multiring._cli.plan.usable_cpus", lambda: [0])
        monkeypatch.setattr("multiring._cli.plan.cores_of_cpus", lambda _cpus: {0: (0, 0)})
        assert main(["plan", "--device", "cuda", "--sizes", "1MiB"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"Assumed: 1 host of {ranks} ranks.")
        assert f"of device tensors on {ranks} ranks" in said
        assert ("Assumed: a device for each rank" in said) == (found is None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--top", "0", *LAB[1:]], "--top 0"),
        (["--measure", *LAB[1:]], "--measure times the job's own hosts"),
        (["broadcast", "--measure"], "--measure times only an all_reduce of float32"),
        (["--sizes", "6", "--measure"], "times only an all_reduce of float32: want sizes of whole floats"),
        (["broadcast", "--wire", "int8", *LAB[1:]], "--wire int8 encodes only an all_reduce of float32"),
        (["--wide", "--wire", "bf16", *LAB[1:]], "want that collective, without --wide"),
        (["--sizes", "much"], "'much' is not a size"),
        (["--link", "1gbit"], "--link describes hosts: say how many there are with --hosts H"),
        (["--hosts", "2", "--slots", "0"], "--slots 0: want at least 1"),
        (["--hosts", "0"], "--hosts 0: want a whole number, 1 to"),
        (["--hosts", "2", "--rack", "3"], "3 racks for 2 hosts"),
        (["--hosts", "2", "--link", "0gbit"], "a link cannot have the rate '0gbit', want 1bit or more"),
        (["--hosts", "2", "--uplink", "1gbit"], "an uplink of 1gbit needs several racks, but there is only one"),
        (["--topology", "t.toml", "--hosts", "2"], "--topology has the hosts and links already"),
        (["--topology", "t.toml", "--rack", "2", "--uplink", "1gbit"], "leave out --rack, --uplink"),
        (["--rack", "2"], "--rack describes hosts: say how many there are with --hosts H"),
        (["--topology", "none.toml"], "topology file 'none.toml'"),
        (["--measure"], "one rank has nothing to measure"),
        ([*LAB[1:], "--save", "/nowhere/p.toml"], "want a path that can be written"),
        (["--device", "cuda", "--measure"], "--device cuda shows prices only"),
        (["--device", "cuda", "--save", "p.toml", *LAB[1:]], "leave out --measure, --save and --draw"),
        (["broadcast", "--device", "cuda", *LAB[1:]], "broadcast --device cuda: want all_reduce"),
        (["--device", "cuda", "--device-link", "pcie"], "say how many hosts there are with --hosts H"),
        (["--device-link", "nvlink", *LAB[1:]], "--device-link nvlink describes devices: want --device cuda, too"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [("", [], "names no hosts"), ("[[hosts]]\nname = 'a'", ["--slots", "0"], "--slots 0: want at least 1")],
)
def test_a_file_that_does_not_do_is_refused(
    text: str, words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.toml").write_text(text)
    assert main(["plan", "--topology", str(tmp_path / "t.toml"), *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [([], "one rank has no links to measure"), (["--seconds", "0"], "--seconds 0"), (["--drain", "-1"], "--drain -1")],
)
def test_a_probe_that_cannot_be_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *words]) == 2
    assert reason in capsys.readouterr().err


def test_outside_a_job_it_says_what_it_assumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("multiring._cli.plan.usable_cpus", lambda: list(range(6)))
    monkeypatch.setattr("multiring._cli.plan.cores_of_cpus", lambda cpus: {cpu: (0, cpu // 2) for cpu in cpus})
    assert main(["plan", "--sizes", "1MiB", "--save", str(tmp_path / "p.toml")]) == 0
    first, _, title, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "Assumed: 1 host of 3 ranks. The costs of its links are assumed, too. For other hosts give --hosts"
    )
    assert title == "all_reduce of 1 MiB on 3 ranks"
    assert all(float(row.split()[0]) > 0 for row in rows)
    assert "3" in (tmp_path / "p.toml").read_text()


# -- the probe's report

FAST = replace(TCP, bandwidth_bytes_per_s=1e8)
SLOW = replace(TCP, bandwidth_bytes_per_s=1e7)


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_host_meets_its_neighbours_one_at_a_time(hosts: int) -> None:
    rounds = _rounds(Topology(tuple((host,) for host in range(hosts))))
    met = [pair for pairs in rounds for pair in pairs]
    assert len(rounds) <= 3
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)
    assert all(sum(host in pair for pair in met) == min(2, hosts - 1) for host in range(hosts))


def test_pairs_are_of_one_rack_where_they_can_be() -> None:
    racks = (Rack(hosts=(0, 2)), Rack(hosts=(1, 3)), Rack(hosts=(4,)))
    met = {pair for pairs in _rounds(Topology(tuple((host,) for host in range(5)), racks=racks)) for pair in pairs}
    assert met == {(0, 2), (1, 3), (4, 0)}


def test_a_slow_host_is_named() -> None:
    topology = Topology(((0,), (1,), (2,)), names=("a", "b", "c"), interfaces=("eth0",))
    measured = [[FAST, SLOW, FAST]]
    assert median_of(measured[0]) == FAST
    own, said = slow_hosts(topology, measured, (FAST,))
    assert own == (OwnRails(host=1, rails=(SLOW,)),)
    assert said == ["eth0 of host b carries 80 Mbit/s, the median host's 800 Mbit/s"]
    assert slow_hosts(topology, [[FAST, FAST, FAST]], (FAST,)) == ((), [])


def test_an_interface_that_is_not_what_was_stated_is_named() -> None:
    topology = Topology(((0,), (1,)), rails=(FAST,), interfaces=("eth0",))
    assert far_from_stated(topology, (SLOW,)) == ["eth0 carries 80 Mbit/s, but the topology states 800 Mbit/s"]
    assert far_from_stated(topology, (FAST,)) == []
    assert far_from_stated(Topology(((0,), (1,))), (SLOW,)) == []  # this topology states no bandwidth


def test_an_uplink_is_one_only_where_it_narrows() -> None:
    rack = Rack(hosts=(0, 1))
    (uplink,) = racked(rack, (FAST,), [5e7]).uplinks
    assert uplink is not None
    assert (uplink.bandwidth_bytes_per_s, uplink.latency_s) == (5e7, 0.0)
    assert racked(rack, (FAST,), [1.9e8]).uplinks == ()
