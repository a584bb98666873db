"""The package replaces or removes no foreign files: every call that could is listed with its reason."""

import ast
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiring._bench import install, plot
from multiring._cli.drawings import check_figure, write_figure
from multiring._launch import logs
from multiring._replacing import replace_file
from multiring._runtime.group.plan_file import write_pins
from multiring._runtime.rails.topology_file import check_topology, write_topology
from multiring._topology import TCP, Topology
from multiring.data.caching.blocks import BlockCache, remove_blocks
from multiring.errors import ArgumentError, LaunchError

SOURCE = Path(__file__).parents[2] / "src" / "multiring"
ACTS = {"unlink", "rmtree", "rmdir", "removedirs", "rename", "write_text", "write_bytes", "truncate", "ftruncate"}
ACTS |= {"savefig", "symlink_to", "hardlink_to", "copyfile", "copytree", "copy2"}
OF_MODULES = {("os", "remove"), ("shutil", "move")}  # other owners' `remove` and `move` are methods of lists and arrays
WORDS = (*ACTS, "os.remove(", "shutil.move(", ".replace(", "open(")  # a file with such a call contains one of them
MAKING = {"O_CREAT", "O_TRUNC", "O_WRONLY", "O_RDWR"}
OWN_FOLDER = "in a folder that this process made"
RANDOM = "its name has a random number of this process's"
# For each function: why the files that it replaces or removes belong to multiring.
KNOWN_BY = {
    "_bench/compare.py::Bench._run_job": OWN_FOLDER,
    "_bench/install.py::_make": "its stamp, without which it refuses",
    "_bench/install.py::install": "a lock, which is opened and not changed",
    "_bench/job.py::Jobs.run": OWN_FOLDER,
    "_bench/plot.py::plot": "written to memory, and by replace_file",
    "_bench/step.py::StepBench._measure": OWN_FOLDER,
    "_bench/step.py::StepBench._run": OWN_FOLDER,
    "_bench/workers/contract.py::_write": OWN_FOLDER,
    "_bench/workers/contract.py::write_cases": OWN_FOLDER,
    "_bench/workers/step_case.py::FileRendezvous.tell": OWN_FOLDER,
    "_bench/workers/step_case.py::StepCase.write": OWN_FOLDER,
    "_cli/output.py::show": "the null device, in place of a closed stdout",
    "_cli/run_timeline.py::make_do_with_parts": "parts that merge has read, and beginnings of timelines",
    "_launch/function.py::call_folder": "in a new folder of tempfile",
    "_launch/function.py::_remove_abandoned": "a folder of call_folder: with the file that its dead caller had locked",
    "_launch/profiled.py::_Profiling._tell": "in a folder that the launching process made",
    "_launch/script_copies.py::ScriptCopies.__init__": "in a folder that the launching process made",
    "_launch/script_copies.py::_has_ended": "a lock, which is opened and not changed",
    "_launch/host_agent.py::_own_streams": "the null device, in place of standard input",
    "_verify/behaviours/calls.py::shared": "memory without a name",
    "_verify/running.py::machine_here": OWN_FOLDER,
    "_verify/workers/gpu.py::main": "in a folder that the launching process made",
    "_verify/workers/jax_programs.py::main": "in a folder that the launching process made",
    "_verify/workers/jax_programs.py::": "in a folder that the launching process made",
    "data/caching/blocks.py::BlockCache._quarantine": "moved to a new name, and not removed",
    "data/caching/blocks.py::BlockCache._write": f"{RANDOM}; it replaces a block of the same key and number",
    "data/caching/blocks.py::BlockCache.remove": "a block by its key, a digest of what it holds",
    "data/caching/blocks.py::clean": "place, name and first bytes",
    "data/caching/blocks.py::remove_blocks": "place, name and first bytes; folders only where they are empty",
    "data/caching/keeping.py::_Others.end": RANDOM,
    "data/caching/keeping.py::_Others.tell": RANDOM,
    "data/caching/mapped.py::_remove": RANDOM,
    "data/feeding/processes.py::ProcessWorkers._area": "memory without a name",
    "data/packing/writing.py::_ShardWriter.__init__": OWN_FOLDER,
    "data/packing/writing.py::_write": OWN_FOLDER,
    "data/packing/writing.py::pack": f"{OWN_FOLDER}, of a random name; put where nothing is",
    "_exchanges/shared_file.py::SharedFileExchange._remove_leftovers": "this user's file, by the name for this job",
    "_exchanges/shared_file.py::SharedFileExchange.close": "a file that this process has made",
    "_exchanges/shared_file.py::_write": f"it makes a new file; {RANDOM}",
    "_frontend/checkpoint/array_file.py::write": f"{OWN_FOLDER}, or a manifest-TOKEN.new",
    "_frontend/checkpoint/folder.py::SaveAttempt.__exit__": "an empty folder that it made",
    "_frontend/checkpoint/folder.py::SaveAttempt.begin": "it makes a new file",
    "_frontend/checkpoint/folder.py::_clean": "a manifest or a mark; folders only where they are empty",
    "_frontend/checkpoint/folder.py::_is_lost": "a mark, which is locked and not changed",
    "_frontend/checkpoint/folder.py::_remove": "a manifest or a mark; folders only where they are empty",
    "_frontend/checkpoint/folder.py::_remove_parts": "a manifest or a mark, and their names",
    "_frontend/checkpoint/folder.py::publish": "require_ours has read the manifest that it replaces",
    "keras/saving.py::_written_whole": "Keras' own save, which replaces what the program names",
    "lab/host.py::_furnish": "file systems that it mounted, seen by no other process",
    "lab/host.py::_mount_sys": "file systems that it mounted, seen by no other process",
    "_launch/function.py::run_function": OWN_FOLDER,
    "_launch/logs.py::open_log": "the list of logs beside it, without which it refuses",
    "_launch/live_record.py::_opened": "it appends, to a new file or to a record by its first bytes",
    "_launch/host_agent.py::Agent.run": "memory without a name",
    "_launch/logs.py::_take": "it adds a line",
    "_launch/pickled_call.py::CallFiles.leave": "memory without a name",
    "_launch/pickled_call.py::CallFolder.leave": OWN_FOLDER,
    "_launch/pickled_call.py::CallFolder.refuse": OWN_FOLDER,
    "_launch/pickled_call.py::CallFolder.send": OWN_FOLDER,
    "_launch/pickled_call.py::CallFolder.take": OWN_FOLDER,
    "_launch/pickled_call.py::unnamed_file": "memory without a name",
    "_launch/standard_streams.py::open_closed_streams": "the null device",
    "_launch/terminal_writes.py::write_ready": "a terminal, which is opened again and not changed",
    "_replacing.py::replace_files": "its caller's is_ours, told the content",
    "_runtime/tracing/last_rank.py::merge_if_last": "parts that merge has read",
    "_runtime/tracing/recording.py::Recording.remove": "a part that this process holds by a lock",
    "_runtime/tracing/timeline.py::_Writing.close": "parts that it has read",
    "trace/claims.py::Claim.__init__": "an empty file, or a part by its first line",
    "trace/claims.py::Claim.release": "a part that this process holds by a lock",
    "trace/claims.py::_locked": "it is looked at before it is changed",
    "trace/file.py::TraceFile._open": "it makes a new file",
    "trace/file.py::TraceFile.close": "require_timeline has read what it replaces",
    "trace/file.py::TraceFile.discard": RANDOM,
    "trace/file.py::clear": "parts and timelines by their content",
    "training/checkpoints.py::Checkpoints.save": "a checkpoint by its manifest, with nothing else in its folder",
    "training/loop.py::TrainingRun._write": "a run's folder by its options; it adds a line",
    "training/run_folder.py::claim": "a lock, which is opened and not changed",
    "training/report.py::_svg": "written to memory",
    "trials/journal.py::_drop_part": "the part of a line at the end of a journal, which opened_journal has recognized",
    "vision/formats/coco.py::write_coco": OWN_FOLDER,
    "vision/formats/exchange.py::_copy": "it makes a new file",
    "vision/formats/exchange.py::_new_folder": f"{OWN_FOLDER}, of a random name; put where nothing is",
    "vision/formats/mask_files.py::write_masks": OWN_FOLDER,
    "vision/formats/tables.py::write_csv": OWN_FOLDER,
    "vision/formats/voc.py::write_classes": OWN_FOLDER,
    "vision/formats/voc.py::write_voc": OWN_FOLDER,
    "vision/formats/yolo.py::write_yolo": OWN_FOLDER,
    "vision/labelling/frames.py::make_frames": f"{OWN_FOLDER}, of a random name; put where nothing is",
    "vision/labelling/proposing.py::propose": "a file of proposals, by place and name; it adds lines",
    "vision/predicting/part_files.py::PartFolder._try_lock": "the lock's file, which it opens and does not cut",
    "vision/predicting/part_files.py::PartFolder.release": "the lock's file, if nothing else is in the folder",
    "vision/predicting/part_files.py::_named": "put where nothing is: it makes the name first, alone",
    "vision/predicting/part_files.py::PartFolder.remove": "parts by their names, in the folder of a job",
    "vision/predicting/part_files.py::PartWriter.__init__": f"it makes a new file; {RANDOM}",
    "vision/predicting/part_files.py::publish": f"{RANDOM}; put where nothing is",
}


def acts(call: ast.Call) -> bool:
    """Return whether a call may replace, empty or remove a file."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name in ACTS or (owner, name) in OF_MODULES:
        return True
    if name == "replace":  # `str.replace` takes two arguments, and `dataclasses.replace` takes keywords
        return isinstance(call.func, ast.Attribute) and len(call.args) == 1 and not call.keywords
    return name in {"open", "fdopen"} and any(map(_makes, call.args + [each.value for each in call.keywords]))


def _makes(argument: ast.expr) -> bool:
    for each in ast.walk(argument):
        if isinstance(each, ast.Attribute) and each.attr in MAKING:
            return True
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            mode = set(each.value)
            if mode & set("wxa+") and mode <= set("rwxabt+"):
                return True
    return False


def calls_in(node: ast.AST, where: str = "") -> Iterator[str]:
    """Yield the functions of a module that contain such calls."""
    for each in ast.iter_child_nodes(node):
        named = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{where}.{each.name}".strip(".") if named else where  # type: ignore[attr-defined]
        if isinstance(each, ast.Call) and acts(each):
            yield inner
        yield from calls_in(each, inner)


def test_every_call_that_could_is_listed_with_its_reason() -> None:
    found = Counter(
        f"{path.relative_to(SOURCE)}::{each}"
        for path in SOURCE.rglob("*.py")
        if any(each in (text := path.read_text("utf-8")) for each in WORDS)
        for each in calls_in(ast.parse(text))
    )
    assert set(found) == set(KNOWN_BY), "add to KNOWN_BY why the files are multiring's own, or call replace_file"


def test_calls_that_could_are_found() -> None:
    text = "def f():\n {}\n"
    for could in (
        "p.unlink()",
        "shutil.rmtree(p)",
        "a.replace(b)",
        "p.open('w')",
        "open(p, mode='r+b')",
        "os.remove(p)",
    ):
        assert list(calls_in(ast.parse(text.format(could)))) == ["f"]
    for cannot in ("p.open()", "open(p, 'rb')", "s.replace('a', 'b')", "replace(a, b=1)", "names.remove(a)"):
        assert not list(calls_in(ast.parse(text.format(cannot))))


NOTES = b"a week of it"


def plan(path: Path) -> None:
    write_pins(path, [], Topology(hosts=((0,), (1,)), rails=(TCP,)))


def topology(path: Path) -> None:
    check_topology(path)
    write_topology(path, Topology(hosts=((0,), (1,)), rails=(TCP,)), "Measured by multiring probe on 2 hosts.")


def figure(path: Path) -> None:
    check_figure(path.with_suffix(".svg"))
    from multiring._cli import drawings  # noqa: PLC0415 -- a private function, of which the drawings are made

    write_figure(path.with_suffix(".svg"), drawings._svg(1, 1, []))


def bench(path: Path) -> None:
    plot.check_plot(path.with_suffix(".png"))
    data = b"\x89PNG " + plot._WRITER.encode()
    replace_file(path.with_suffix(".png"), data, is_ours=plot._is_figure, what=plot._WHAT)


@pytest.mark.parametrize("write", [plan, topology, figure, bench])
def test_an_output_replaces_its_like_alone(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path)
    (made,) = tmp_path.iterdir()
    made.chmod(0o640)
    write(path)
    assert made.stat().st_mode & 0o777 == 0o640
    wanted = made.read_bytes()
    for other in (NOTES, b"# hosts by hand\n" + wanted):
        made.write_bytes(other)
        with pytest.raises(ArgumentError, match=r"is there already, and is not .* that multiring wrote; it was left"):
            write(path)
        assert made.read_bytes() == other
    made.write_bytes(b"")
    write(path)
    (tmp_path / "kept").write_bytes(NOTES)
    made.unlink()
    made.symlink_to("kept")
    with pytest.raises(ArgumentError, match="is there already"):
        write(path)
    made.unlink()
    made.mkdir()
    with pytest.raises(ArgumentError, match="is a folder, and no place for"):
        write(path)
    assert (tmp_path / "kept").read_bytes() == NOTES
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["kept", made.name])


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        descriptor = Path(f"/proc/self/fd/{reader.stdin.fileno()}")
        replace_file(descriptor, b"told", is_ours=lambda _: False, what="a file")
        assert reader.communicate()[0] == b"told"
    replace_file(Path("/dev/null"), b"told", is_ours=lambda _: False, what="a file")
    assert Path("/dev/null").is_char_device()
    assert not list(tmp_path.iterdir())


def test_logs_replace_logs_alone(tmp_path: Path) -> None:
    logs._take(tmp_path, "rank-0.out")
    (tmp_path / "rank-0.out").write_bytes(NOTES)
    logs._take(tmp_path, "rank-0.out")
    (tmp_path / "rank-1.out").write_bytes(NOTES)
    with pytest.raises(
        LaunchError, match=r"rank-1.out is there already, and .multiring-logs in the same folder does not list"
    ):
        logs._take(tmp_path, "rank-1.out")
    assert (tmp_path / logs.LOGS).read_text() == "rank-0.out\n"


def test_an_environment_of_somebody_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_python_for", lambda *_: "python")
    monkeypatch.setattr(install, "_step", lambda *_: None)
    recipe = next(name for name, each in install.RECIPES.items() if not each.tools)
    folder = tmp_path / "env"
    install._make(recipe, folder, print)
    (folder / "bin").mkdir()
    install._make(recipe, folder, print)  # replaces its own environment
    assert sorted(each.name for each in folder.iterdir()) == [install._STAMP]
    (folder / install._STAMP).rename(folder / "notes.txt")
    with pytest.raises(LaunchError, match="exists, but lacks multiring-recipe, the mark of multiring's installations"):
        install._make(recipe, folder, print)
    assert (folder / "notes.txt").exists()


def test_only_blocks_of_a_killed_process_go(tmp_path: Path) -> None:
    cache, key = BlockCache(tmp_path, 1 << 20, print), f"map-of-{'0' * 16}-1-1-{'0' * 16}"
    cache.get(key, 3, lambda: b"block")
    note = tmp_path / key / "notes.txt"
    note.write_bytes(NOTES)
    remove_blocks(tmp_path, key)
    assert list((tmp_path / key).rglob("*")) == [note]
    note.unlink()
    cache.get(key, 3, lambda: b"block")
    remove_blocks(tmp_path, key)
    assert not (tmp_path / key).exists()
