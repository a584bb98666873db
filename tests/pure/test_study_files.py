"""Files of studies for `multiring trials run`: wrong ones, their lines, the lines of scripts, and random changes."""

import copy
import json
import math
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from multiring.errors import ArgumentError
from multiring.trials import report
from multiring.trials.command.lines import LinePattern, ReportedValue, own_line, own_report
from multiring.trials.command.study_file import line_of, read_study_file
from multiring.trials.command.trial_job import JobPatterns, TrialCommand, TrialJob
from multiring.trials.command.words import command_line, filled
from multiring.trials.plan import plan_of

GOOD = """\
name = "digits"
trials = 4
ranks = 2
time_limit_s = 60
words = ["--rate", "{rate}", "--kind={kind}"]
report = "epoch {step}: loss {value}"

[space]
rate = {low = 1e-5, high = 0.1, log = true}
kind = ["a", "b"]

[sampler]
kind = "TPESampler"
seed = 7

[pruner]
kind = "MedianPruner"
n_startup_trials = 2

[judge]
seeds = [1, 2]
words = ["--seed", "{seed}"]
"""


def read(folder: Path, text: str) -> Any:
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    file = read_study_file(path, ["python", "train.py"])
    try:
        plan_of(file.arguments(), [range(file.ranks or 2)])
    except ArgumentError as error:
        raise (error if str(error).startswith(str(path)) else file.wrong(error)) from None
    return file


def test_a_good_file(tmp_path: Path) -> None:
    file = read(tmp_path, GOOD)
    assert (file.words, file.ranks, file.time_limit_s) == (("--rate", "{rate}", "--kind={kind}"), 2, 60)
    assert file.judge is not None
    assert file.judge.seeds == (1, 2)
    assert file.arguments().sampler.__class__.__name__ == "TPESampler"
    assert filled(("--rate", "{rate}", "{x}", "{on}"), {"rate": 1e-05, "on": True}) == [
        "--rate",
        "1e-05",
        "{x}",
        "true",
    ]
    assert (
        command_line(["python", "a b.py", "{rate}"], {"rate": 0.1}, 3, 2) == "multiring run -n 2 -- python 'a b.py' 0.1"
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("trials = 4", "trials = 0", 2, "trials: 0: want the number of trials"),
        ("trials = 4", "trial = 4", 2, "trial: unknown field: want one of name, direction, trials"),
        ("trials = 4\n", "", 0, "trials: it is missing: want the number of trials"),
        ("trials = 4", "trials = true", 2, "trials: True"),
        ('name = "digits"', "name = 3", 1, "name: 3: want a text"),
        ("ranks = 2", "ranks = 2\nranks_per_trial = 3", 4, "3: want 1 to 2, the number of ranks"),
        (
            "ranks = 2",
            'ranks = 2\nranks_per_trial = "layers"',
            4,
            "ranks_per_trial: 'layers': want one of the parameters",
        ),
        ("ranks = 2", "ranks = 1000000000", 3, "ranks: 1000000000: want the number of ranks that run at a time, 1 to"),
        ("ranks = 2", 'ranks = 2\ndirection = "down"', 4, "direction: 'down': want 'minimize' or 'maximize'"),
        ("time_limit_s = 60", "time_limit_s = 0", 4, "time_limit_s: 0: want seconds above 0"),
        ("time_limit_s = 60", "time_limit_s = nan", 4, "time_limit_s: nan: want seconds above 0"),
        ('"{rate}"', '"{rat}"', 5, "words: {rat} is no parameter of the study: want one of ['kind', 'rate']"),
        (
            '"--kind={kind}"',
            '"--kind"',
            10,
            "space.kind: no word of the command has {kind}, so it would have no effect",
        ),
        ("loss {value}", "loss {v}", 6, "report: 'epoch {step}: loss {v}' has {v}: want {value}, {}, {step}"),
        ("loss {value}", "loss", 6, "want a line with {value}"),
        ("low = 1e-5", "low = 0.2", 9, "space.rate: "),
        ("low = 1e-5", "low = 0.0", 9, "low > 0"),
        ("high = 0.1,", "", 9, "high=None: want a finite number"),
        ('["a", "b"]', '["a", "a"]', 10, "a choice twice"),
        ('["a", "b"]', '"a"', 10, "it is of type str"),
        ("rate = {low", "seed = {low", 9, "space.seed: want letters, digits and _, and neither 'trial' nor 'seed'"),
        ('kind = "TPESampler"', 'kind = "TPE"', 13, "sampler.kind: 'TPE': want one of"),
        ('kind = "TPESampler"\n', "", 12, "sampler: its kind is missing"),
        ("seed = 7", "sead = 7", 14, "sampler.sead: TPESampler refuses its options"),
        ("n_startup_trials = 2", "n_startup_trials = -2", 18, "pruner.n_startup_trials: MedianPruner refuses"),
        ('kind = "MedianPruner"', 'kind = "BasePruner"', 17, "pruner.kind: 'BasePruner': want one of"),
        ("seeds = [1, 2]", "seeds = [1, 1]", 21, "judge.seeds: [1, 1]: want a list of different whole numbers"),
        ('"{seed}"', '"7"', 22, "judge.words: no word has {seed}, so all runs would be the same"),
        ("seeds = [1, 2]\n", "", 20, "judge: seeds is missing"),
        ("[space]", "[spaces]", 8, "spaces: unknown field"),
        (
            "trials = 4",
            'trials = 4\nstorage = "/nowhere/study.db"',
            3,
            "storage: '/nowhere/study.db': it cannot be opened",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_field(tmp_path: Path, old: str, new: str, line: int, told: str) -> None:
    assert old in GOOD
    with pytest.raises(ArgumentError) as raised:
        read(tmp_path, GOOD.replace(old, new, 1))
    text = str(raised.value)
    assert told in text
    assert text.startswith(f"{tmp_path}/study.toml, line {line}: " if line else f"{tmp_path}/study.toml: "), text


def test_a_file_that_begins_with_a_mark(tmp_path: Path) -> None:
    assert read(tmp_path, f"\ufeff{GOOD}").ranks == 2
    with pytest.raises(ArgumentError, match=r"study\.toml, line 1: name: '': want a text"):
        read(tmp_path, "\ufeff" + GOOD.replace("digits", ""))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read the study in"):
        read_study_file(tmp_path / "none.toml", [])
    with pytest.raises(ArgumentError, match=r"not valid TOML.*line 1"):
        read(tmp_path, "trials = = 3")


def test_random_changes_are_refused_or_read(tmp_path: Path) -> None:
    """Every file is read or refused by an ArgumentError that names the file, whatever is in its fields."""
    random = Random(5)  # noqa: S311 -- no secret
    values = [
        "0",
        "-1",
        "true",
        '""',
        '"x"',
        "nan",
        "inf",
        "[]",
        "[1]",
        '["{seed}"]',
        "{}",
        '{kind = "x"}',
        "1e400",
        '"{"',
    ]
    lines = GOOD.splitlines()
    refused: list[str] = []
    for _ in range(300):
        changed = list(lines)
        for _ in range(random.randint(1, 2)):
            at = random.randrange(len(changed))
            key, equals, _ = changed[at].partition(" = ")
            changed[at] = random.choice(
                ["", f"{key}{equals}{random.choice(values)}", changed[at][: random.randrange(20)]]
            )
        try:
            read(tmp_path, "\n".join(changed))
        except ArgumentError as error:
            refused.append(str(error))
    assert 100 < len(refused) < 300
    assert all(str(tmp_path) in each for each in refused)


def test_lines_of_fields() -> None:
    text = 'a = 1\n[t."b c"]\nd.e = """\nf = 2\n"""\nf = 3\n'
    assert line_of(text, ("a",)) == 1
    assert line_of(text, ("t", "b c", "d", "e")) == 3
    assert line_of(text, ("t", "b c", "f")) == 6
    assert line_of(text, ("t", "b c", "g")) == 2
    assert line_of(text, ("z",)) == 0


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        ("epoch {step}: loss {value}", "12:00 epoch 3:  loss 0.25 (best)", (3, 0.25)),
        ("epoch {step}: loss {value}", "epoch 3: loss 1e-05.", (3, 1e-5)),
        ("epoch {step}: loss {value}", "epoch 3: lost 1", None),
        ("loss {value}", "loss -.5", (None, -0.5)),
        ("loss {value}", "loss 3.", (None, 3.0)),
        ("loss {value}", "loss n/a", None),
        ("loss {value}", "loss 0x10", None),
        ("loss {value}", "loss 1.2.3", None),
        ("loss {value}", "loss inf", (None, math.inf)),
        ("{} acc={value}%", "val (x) acc=99.5%", (None, 99.5)),
        ("f(x) {value}", "f(x) 2", (None, 2.0)),
        ("loss {value}", "loss 0,53", None),
        ("loss {value}", "loss 1,234.5", None),
        ("{value}", "-0,53", None),
        ("{value}", "1.2.3", None),
        ("{} is {}{value}", "the loss is now 0,53", None),
        ("loss {value}", "loss 3, 4 s", (None, 3.0)),
        ("loss {value}", "loss 0.25,0.91", (None, 0.25)),
        ("{step},{value},{}", "3,1,0.91", (3, 1.0)),
    ],
)
def test_lines_of_scripts(pattern: str, line: str, found: tuple[int | None, float] | None) -> None:
    assert LinePattern(pattern, has_step=True).found_in(line) == (None if found is None else ReportedValue(*found))


def test_what_counts_of_a_job_s_output() -> None:
    told: list[tuple[int, float]] = []
    command = TrialCommand(words=(), slots=(0,), of=1, devices=None, grace_s=1.0, log_dir=None, log="")
    pattern = LinePattern("epoch {step}: loss {value}", has_step=True)
    job = TrialJob(command, JobPatterns(report=pattern), lambda step, value: told.append((step, value)))
    for line in (
        "[1] epoch 0: loss 9",
        "[0] epoch 0: loss 5",
        "[0] epoch 1: loss 4\repoch 2: loss 3\r",
        f"[0] {own_line(3, 2.5)}",
        "epoch 4: loss 1",
    ):
        job._take(line.encode(), is_out=True)
    job._take(b"[0] epoch 5: loss 0", is_out=False)
    assert told == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.5)]
    assert (job.value(), job.problem) == (2.5, "")
    job._take(b"[0] epoch 3: loss 2.5", is_out=True)
    assert (job.value(), job.problem) == (None, "it reported step 3 twice: 2.5, then 2.5")


def test_the_line_of_report(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (0.1, -1e300, 3, math.inf):
        report(value, step=7)
        line = capsys.readouterr().out
        assert own_report(line) == ReportedValue(7, float(value))
        assert own_report(f"progress 3/4\r{line}") == ReportedValue(7, float(value))
    assert math.isnan(own_report(own_line(0, math.nan)).value)  # type: ignore[union-attr]
    assert own_report("multiring trial: step 3: high") is None
    for wrong in ({"value": "low", "step": 1}, {"value": 1.0, "step": -1}, {"value": 1.0, "step": 0.5}):
        with pytest.raises(ArgumentError, match="want a"):
            report(**copy.copy(wrong))


def test_messages_about_a_storage_have_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiring.trials import page  # noqa: PLC0415 -- Optuna is an extra

    none = SimpleNamespace(get_all_studies=list)
    monkeypatch.setattr(page, "opened", lambda _: (none, None))
    with pytest.raises(ArgumentError, match=r"user:\.\.\.@host/studies' has the studies \[\]") as raised:
        page.write_page("postgresql://user:hidden@host/studies", None, tmp_path / "page.html")
    assert "hidden" not in str(raised.value)


def test_values_that_a_page_shows_are_json(tmp_path: Path) -> None:
    import optuna  # noqa: PLC0415 -- an extra

    from multiring.trials.page import page_of, study_data, write_page  # noqa: PLC0415 -- as above

    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url, study_name="</script><b>")
    for number in range(4):
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
        trial.report(math.inf, 0)
        study.tell(trial, float(number) if number else math.inf)
    data = study_data(study)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["trials"][0]["value"] == "inf"
    assert data["importance"] or data["importanceReason"]
    page = page_of(study)
    assert page.count("</script>") == 1
    assert '"the study"' not in page
    path = write_page(f"{tmp_path}/study.db", None, tmp_path / "page.html")
    assert path.read_text() == page
    write_page(f"{tmp_path}/study.db", None, path)
    (tmp_path / "own.html").write_text("mine")
    for storage, name, output, told in (
        (f"{tmp_path}/none.db", None, path, "there is no such file"),
        (f"{tmp_path}/study.db", "other", path, "--name 'other': the storage has the studies"),
        (f"{tmp_path}/study.db", None, tmp_path / "own.html", "own.html"),
    ):
        with pytest.raises(ArgumentError, match=told):
            write_page(storage, name, output)
