"""`multiring bench`: rejected input, written records, and the limits of a lab's wires."""

import builtins
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiring._bench import plot as plotting
from multiring._bench.cases import Question
from multiring._bench.compare import Bound, Comparison, Timing
from multiring._bench.plot import check_plot, plot
from multiring._bench.records import Circumstances, lines_of, records_of, settings_lines, why_not_publishable
from multiring._cli import bench, bench_lab, main
from multiring._cli.bench_lab import Wires
from multiring._cli.output import show
from multiring.errors import ArgumentError, UnsupportedError
from multiring.lab import LabPlan

# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to time: name step, or one of all_reduce"),
        (["all_reduce", "--sizes", "64,1MB"], "'1MB' is not a size"),
        (["all_reduce", "--sizes", "63"], "63 bytes of float32 cannot be the buffer of all_reduce on 2 ranks"),
        (["all_reduce", "--dtype", "float7"], "unknown type 'float7', want one of bfloat16"),
        (["all_reduce", "--op", "xor"], "unknown operation 'xor'"),
        (["all_reduce", "--ranks", "0"], "--ranks 0: want a whole number, 1 to"),
        (["all_reduce", "--alternations", "0"], "--alternations 0: want a whole number, 1 to"),
        (["all_reduce", "--against", "nccl"], "unknown library 'nccl', want one of gloo, mpich"),
        (["all_reduce", "--against", "gloo,gloo"], "--against gloo,gloo names a library twice"),
        (
            ["all_reduce", "--against", "multiring-int8"],
            "multiring-int8 differs from multiring only between hosts: give the number of hosts",
        ),
        (["all_reduce", "--pool-mib", "-1"], "--pool-mib -1: want a whole number, 0 to"),
        (["all_reduce", "--pool-mib", "0", "--no-one"], "--no-one and --pool-mib 0 leave nothing to time"),
        (
            ["barrier", "--no-one"],
            "nothing would be timed: --no-one asks for a pool of buffers, and a barrier has no buffers",
        ),
        (
            ["all_reduce", "--no-one", "--sizes", "64,1KiB"],
            "nothing would be timed: --no-one leaves the pool only, and the pool is",
        ),
        *(
            (
                [*kind, "--deadline-s", value],
                f"--deadline-s {float(value):g}: want a number of seconds above 0, at most 86400",
            )
            for kind in (["all_reduce", "--against", "gloo"], ["step"])
            for value in ("1e8", "inf", "nan", "0", "-1")
        ),
        (["barrier", "--plot", "figure.svg"], "--plot figure.svg: a barrier has no sizes to plot"),
        (["all_reduce", "--plot", "figure.bmp"], "cannot plot to figure.bmp, want a name that ends with one of .png"),
        (["all_reduce", "--plot", "no/such/folder/x.png"], "there is no folder"),
        (["all_reduce", "--link", "1gbit"], "--link needs a lab: give its number of hosts with --hosts H"),
        (["all_reduce", "--hosts", "2", "--link", "fast"], "'fast' is not a rate"),
        (["all_reduce", "--hosts", "2", "--uplink", "1gbit"], "needs several racks, but the lab has only one"),
        (["broadcast", "--device", "cuda"], "broadcast --device cuda: only all_reduce is timed on GPUs"),
        (["all_reduce", "--device", "cuda", "--hosts", "2"], "--hosts does not go with --device cuda: omit one"),
        (["all_reduce", "--device", "cuda", "--no-one"], "--no-one does not go with --device cuda: omit one of them"),
        (
            ["all_reduce", "--device", "cuda", "--against", "mpich"],
            "'mpich' does not take CUDA tensors here, want one of gloo, nccl",
        ),
        (["--install", "nccl"], "there is no recipe to install 'nccl'"),
    ],
)
def test_bad_input_is_one_line_and_2(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_an_unknown_collective_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "gather"])
    assert exit_.value.code == 2
    assert "invalid choice: 'gather' (choose from" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIRING_BENCH_PEERS", str(tmp_path))
    assert main(["bench", "all_reduce", "--against", "gloo,mpich"]) == 2
    said = capsys.readouterr()
    assert "mpich is not installed" in said.err
    assert said.err.endswith("install it with: multiring bench --install mpich\n")


def test_a_lab_needs_root_and_has_its_own_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["bench", "all_reduce", "--hosts", "2"]) == 2
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main(["bench", "all_reduce", "--hosts", "2", "--ranks", "4"]) == 2
    assert "--ranks 4: in a lab the number of ranks is --hosts times --slots" in capsys.readouterr().err


def test_installing_asks_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def install(name: str, out: Callable[[str], object]) -> None:
        assert out is show
        asked.append(name)

    monkeypatch.setattr(bench, "install", install)
    assert main(["bench", "--install", "mpich,horovod"]) == 0
    assert asked == ["mpich", "horovod"]


# ---- output ----

QUESTION = Question(collective="all_reduce", ranks=4, size_bytes=1 << 20)
CIRCUMSTANCES = Circumstances(hardware="a machine", commit="abc", command="multiring bench", ping_pong_us=5.0)


def timing(library: str, seconds: Sequence[float], **fields: Any) -> Timing:
    settings: Mapping[str, str] = {"knob": "1"} if library == "gloo" else {}
    return Timing(library, "x", "arena", QUESTION, seconds=list(seconds), version="1.0", settings=settings, **fields)


def comparison(*timings: Timing, other_cores: float = 0.0, pool_bytes: int = 0) -> Comparison:
    return Comparison(
        question=QUESTION,
        pool_bytes=pool_bytes,
        timings=timings,
        bound=Bound(4e9),
        other_cores=other_cores,
    )


OURS = timing("multiring", [1e-3] * 6)
GLOO = timing("gloo", [4e-3, 5e-3, 6e-3, 4e-3, 5e-3, 6e-3])
MPI = timing("mpich", [2e-3] * 5 + [1e-3])
NONE = Timing("horovod", "gloo", "ordinary", QUESTION, not_offered="it has no such thing")


def test_records_hold_ours_against_the_best_and_the_others_against_ours() -> None:
    ours, gloo, mpich, none = records_of(comparison(OURS, GLOO, MPI, NONE), CIRCUMSTANCES)
    assert (ours["against"], ours["ratio"], ours["interval"]) == ("mpich", 2.0, [1.0, 2.0])
    assert (gloo["against"], gloo["ratio"]) == ("multiring", pytest.approx(1 / 5))
    assert gloo["interval"] == pytest.approx([1 / 6, 1 / 4])
    assert (mpich["ratio"], mpich["interval"]) == (0.5, [0.5, 1.0])
    assert ours["algbw_bytes_per_s"] == pytest.approx((1 << 20) / 1e-3)
    assert ours["busbw_bytes_per_s"] == pytest.approx(1.5 * (1 << 20) / 1e-3)
    assert ours["level"] == 0.96875
    assert ours["publishable"]
    assert none["not_offered"] == "it has no such thing"
    assert "median_s" not in none
    assert json.loads(json.dumps([ours, none])) == [ours, none]


def test_variants_are_no_peers_of_ours() -> None:
    variant = timing("multiring-bf16", [0.5e-3] * 6)
    ours, bf16, _ = records_of(comparison(OURS, variant, GLOO), CIRCUMSTANCES)
    assert (ours["against"], ours["ratio"]) == ("gloo", 5.0)
    assert (bf16["against"], bf16["ratio"]) == ("multiring", 2.0)
    assert records_of(comparison(OURS, variant), CIRCUMSTANCES)[0]["against"] is None


def test_alone_the_interval_is_the_times_own() -> None:
    (record,) = records_of(comparison(timing("multiring", [3.0, 1.0, 2.0])), CIRCUMSTANCES)
    assert (record["against"], record["ratio"], record["interval"]) == (None, None, [1.0, 3.0])


def test_what_speaks_against_publishing_is_said() -> None:
    busy = comparison(timing("multiring", [1.0] * 5), other_cores=0.06)
    assert why_not_publishable(busy) == [
        "other work took 6% of a core, more than 5%",
        "no 95 % interval from 5 alternations, want at least 6",
    ]
    assert not records_of(busy, CIRCUMSTANCES)[0]["publishable"]
    assert "  not publishable: other work took 6% of a core, more than 5%" in lines_of(busy)
    assert why_not_publishable(comparison(OURS, other_cores=0.05)) == []


def test_the_table() -> None:
    lines = lines_of(comparison(OURS, GLOO, NONE, pool_bytes=1 << 29))
    assert lines == [
        "all_reduce, 1 MiB float32, 4 ranks, rotating over 512 MiB a rank",
        "  library    buffers    median                      GB/s    bus  of bound  multiring is faster by",
        "  multiring  arena     1.00 ms  [1.00 ms, 1.00 ms]  1.05   1.57       26%",
        "  gloo       arena     5.00 ms  [4.00 ms, 6.00 ms]  0.21  0.315        5%       5.00 [4.00, 6.00]",
        "  horovod    ordinary        -                         -      -         -                       -",
        "  horovod: not offered: it has no such thing",
        "  bound 4 GB/s",
    ]
    assert settings_lines([OURS, GLOO, NONE]) == ["  multiring: 1.0", "  gloo: 1.0; knob=1"]


@pytest.mark.parametrize("suffix", plotting.FORMATS)
def test_a_figure_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"
    check_plot(path)
    plot([comparison(OURS, GLOO, NONE), comparison(OURS, GLOO, NONE, pool_bytes=1 << 29)], path)
    larger = replace(QUESTION, size_bytes=1 << 23)
    plot([comparison(OURS, GLOO, NONE), replace(comparison(OURS, GLOO, NONE), question=larger)], path)
    assert path.stat().st_size > 1000


def test_a_figure_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(ArgumentError, match=r"taken\.png' is a folder, and no place for a figure"):
        plot([comparison(OURS)], tmp_path / "taken.png")
    importing = builtins.__import__

    def without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.setattr("builtins.__import__", without_matplotlib)
    with pytest.raises(UnsupportedError, match="matplotlib, which is not installed: pip install matplotlib"):
        check_plot(tmp_path / "figure.png")


# ---- the lab's wires ----


@pytest.mark.parametrize(
    ("collective", "hosts", "slots", "want"),
    [
        ("all_reduce", 4, 2, 0.118e9 * 4 / 6),
        ("all_reduce", 2, 1, 0.118e9),
        ("reduce_scatter", 4, 2, 0.118e9 * 4 / 3),
        ("all_gather", 4, 2, 0.118e9 * 4 / 3),
        ("broadcast", 4, 2, 0.118e9),
        ("all_to_all", 4, 2, 0.118e9 * 4 / 6),
        ("barrier", 4, 2, None),
    ],
)
def test_the_bound_is_where_a_hosts_links_are_full(collective: str, hosts: int, slots: int, want: float | None) -> None:
    plan = LabPlan(hosts=hosts, slots=slots)
    question = Question(collective=collective, ranks=hosts * slots, size_bytes=1 << 20, hosts=hosts)
    got = bench_lab.bound(question, plan, Wires(host=0.118e9, rack=None))
    assert (None if got is None else got.bytes_per_s) == (None if want is None else pytest.approx(want))


def test_a_narrow_uplink_is_the_bound() -> None:
    plan = LabPlan(hosts=4, slots=2, racks=2, rails=(10**9,), uplink=10**8)
    question = Question(collective="all_reduce", ranks=8, size_bytes=1 << 20, hosts=4)
    narrow = bench_lab.bound(question, plan, Wires(host=0.118e9, rack=0.0118e9))
    wide = bench_lab.bound(question, plan, Wires(host=0.118e9, rack=9e9))
    assert narrow is not None
    assert wide is not None
    assert narrow.bytes_per_s == pytest.approx(0.0118e9)
    assert wide.bytes_per_s == pytest.approx(0.118e9 * 4 / 6)
    assert narrow.formula == (
        "hosts 118.0 MB/s / (2 (4 - 1) / 4) = 78.7 MB/s; racks 11.8 MB/s / (2 (2 - 1) / 2) = 11.8 MB/s"
    )
    shown = replace(comparison(OURS), bound=narrow)
    assert f"  bound 0.0118 GB/s: {narrow.formula}" in lines_of(shown)
    assert records_of(shown, CIRCUMSTANCES)[0]["bound_formula"] == narrow.formula


def test_a_job_is_started_in_the_lab_that_was_asked_for() -> None:
    plan = LabPlan(hosts=4, slots=2, racks=2, rails=(10**9, 250 * 10**6), uplink=5 * 10**8)
    command = " ".join(bench_lab.command_of(plan)("mpiexec"))
    wanted = "lab --hosts 4 --slots 2 --rack 2 --link 1000000000bit --rail 250000000bit --uplink 500000000bit"
    assert command.endswith(f"-m multiring {wanted} --launcher mpiexec --")
    assert bench_lab.network_text(plan) == (
        "lab of 4 hosts x 2 ranks, links of 1gbit, 250mbit, 2 racks with uplinks of 500mbit"
    )
    assert bench_lab.wires_of(LabPlan(hosts=1)) is None
