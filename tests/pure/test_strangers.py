"""Files for outside contributors agree with the project: CI workflows, hooks, CONTRIBUTING, the release script."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from multiring._runtime.bootstrap import handshake, rendezvous_server
from multiring._version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FORGE = ROOT / ".github"
ADDRESS = "https://github.com/multiring/multiring"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The program of a hook, and the package that contains it.
HOOK_PACKAGES = {"ruff": "ruff", "typos": "typos", "mypy": "mypy", "python": None}
BLOCK = re.compile(r"^ *```\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
STEP = re.compile(r"^\d+\. \*\*", re.MULTILINE)
SYSTEM = {"sudo", "git", "source", "make"}  # programs outside .venv


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0] for line in lines if not line.startswith("#")}


def dev_packages() -> set[str]:
    found = [re.match(r"[\w-]+", each) for each in PROJECT["project"]["optional-dependencies"]["dev"]]
    return {match[0] for match in found if match}


def pythons() -> list[str]:
    """Return the Python versions that .ci/setup accepts."""
    oldest, first_bad = re.findall(r"\(3, (\d+)\)", (ROOT / ".ci" / "setup").read_text(encoding="utf-8"))
    return [f"3.{minor}" for minor in range(int(oldest), int(first_bad))]


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^([a-z][a-z0-9 -]*):(?!=)", text, re.MULTILINE) for name in line.split()}


def steps_commands() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Ten steps\n")[2].partition("\n## ")[0]
    return [line.strip() for block in BLOCK.findall(text) for line in block.splitlines()]


# -- the forge's files


def test_the_templates_ask_for_what_a_report_needs() -> None:
    asked = {}
    for path in sorted((FORGE / "ISSUE_TEMPLATE").glob("*.yml")):
        form = loaded(path)
        if path.stem != "config":
            assert {"name", "description", "body"} <= form.keys(), path.name
            entries = [each for each in form["body"] if each["type"] != "markdown"]
            assert all(each["attributes"]["label"] for each in entries)
            asked[path.stem] = {each["id"] for each in entries if each.get("validations", {}).get("required")}
            assert len({each["id"] for each in entries}) == len(entries), path.name
            assert "multiring run" in path.read_text(encoding="utf-8") or path.stem == "feature"
    assert {"version", "framework", "launcher", "command", "program", "output"} <= asked["bug"]
    assert {"need", "framework"} <= asked["feature"]
    assert {"question", "version", "framework", "tried"} <= asked["question"]
    (contact,) = loaded(FORGE / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]
    assert contact["url"] in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_owners_are_named_for_places_that_exist() -> None:
    lines = (FORGE / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert rows[0][0] == "*"
    for pattern, *owners in rows:
        assert owners, pattern
        assert all(owner.startswith("@multiring/") for owner in owners)
        assert pattern == "*" or list(ROOT.glob(pattern.strip("/"))), f"{pattern} matches nothing"


def test_the_workflow_calls_scripts_that_exist_with_every_python() -> None:
    text = (FORGE / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    for command in commands:
        path = ROOT / command
        assert path.parent == ROOT / ".ci", command
        assert path.stat().st_mode & 0o111, command
    assert jobs["change"]["strategy"]["matrix"]["python"] == pythons()
    assert set(jobs["packages"]["strategy"]["matrix"]["python"]) < set(pythons())
    assert all(job["timeout-minutes"] for job in jobs.values())
    # The workflow and the page name the versions that were not tested.
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## What the forge runs\n")[2]
    for version in pythons():
        assert version in text.partition("name: ci")[0], version
        assert version in page, version


def test_every_supported_python_is_a_classifier() -> None:
    found = re.findall(r":: (3\.\d+)'", str(PROJECT["project"]["classifiers"]))
    assert found == pythons()
    assert PROJECT["project"]["requires-python"] == f">={pythons()[0]}"


def test_the_forge_has_one_address() -> None:
    urls = PROJECT["project"]["urls"]
    assert urls["Repository"] == ADDRESS
    for url in urls.values():
        assert url.startswith(ADDRESS)
        path = url.partition("/blob/main/")[2]
        assert not path or (ROOT / path).is_file(), url
    assert loaded(ROOT / "CITATION.cff")["repository-code"] == ADDRESS
    for path in (ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", FORGE / "ISSUE_TEMPLATE" / "config.yml"):
        found = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", path.read_text(encoding="utf-8"))
        assert set(found) == {ADDRESS}, path.name


def test_the_citation_is_of_this_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]


def test_security_names_the_versions_that_are_supported() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"{VERSION.partition('.')[0]}.x" in text
    assert f"{handshake.UNPROVEN_FRAME_BYTES:,} bytes" in text
    assert f"{rendezvous_server._MAX_PENDING_HANDSHAKES} places" in text
    assert f"{rendezvous_server._YOUNG_S:g} s at the rendezvous" in text


# -- hooks, tools, steps


def test_hooks_call_pinned_tools_of_the_environment_only() -> None:
    repos = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [each["repo"] for each in repos] == ["local"]
    hooks = repos[0]["hooks"]
    assert {hook["id"] for hook in hooks} >= {"format", "lint", "spelling", "prose", "imports", "types"}
    for hook in hooks:
        assert hook["language"] == "system"
        program, *words = hook["entry"].split()
        place, _, name = program.rpartition("/")
        assert place == ".venv/bin"
        package = HOOK_PACKAGES[name]
        if package is None:
            assert (ROOT / words[0]).is_file()
        else:
            assert package in pins() & dev_packages()
    assert {"coverage", "pre-commit"} <= pins() & dev_packages()


def test_precommit_takes_the_configuration() -> None:
    program = Path(sysconfig.get_path("scripts")) / "pre-commit"
    command = [str(program), "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_the_ten_steps_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Ten steps\n")[2].partition("\n## ")[0]
    assert len(STEP.findall(text)) == 10
    commands = steps_commands()
    assert len(commands) > 10
    for command in commands:
        program, *words = shlex.split(command)
        if program == "cd":
            continue
        if program not in SYSTEM:
            assert (Path(sysconfig.get_path("scripts")) / program).exists(), command
        if program == "make":
            assert words[0] in make_targets(), command
        for word in words:
            path = word.partition("=")[2] or word
            if path.startswith(("tests/", "docs/", ".git-")):
                assert (ROOT / path).exists(), command


def test_the_ten_steps_name_the_packages_that_setup_names() -> None:
    wanted = set(re.findall(r"apt-get install (\S+?)[)\"]", (ROOT / ".ci" / "setup").read_text(encoding="utf-8")))
    named = set(steps_commands()[0].split())
    assert {each.replace("%s", "3") for each in wanted} <= named


def test_the_coverage_figure_has_its_command_date_and_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Coverage\n")[2].partition("\n## ")[0]
    measured = [re.search(pattern, text) for pattern in (r"\d\d\.\d %", r"20\d\d-\d\d-\d\d", r"\d+ cores")]
    assert all(measured) or (not any(measured) and "has not been measured yet" in text)
    assert "make coverage" in text
    assert "coverage" in make_targets()
    assert PROJECT["tool"]["coverage"]["run"]["patch"] == ["subprocess"]


@pytest.mark.parametrize("may", [True, False])
def test_the_workflows_linter_says_where_it_was_not_run(tmp_path: Path, may: bool) -> None:  # noqa: FBT001
    """Run the linter in a copy of the tree, without node on PATH."""
    (tmp_path / "packaging").mkdir()
    script = tmp_path / "packaging" / "workflow-lint"
    script.write_bytes((ROOT / "packaging" / "workflow-lint").read_bytes())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dirname").symlink_to("/usr/bin/dirname")
    variables = {"PATH": str(tmp_path / "bin")} | ({"MAY_BE_UNTRIED": "1"} if may else {})
    command = ["/bin/bash", str(script), "2.0.6"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == (0 if may else 1)
    assert done.stderr == "UNTRIED: there is no node or no npm on PATH; no workflow was checked\n"


# -- the release script

TODAY = date(2026, 12, 1)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "packaging" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True).stdout  # noqa: S607


@pytest.fixture(scope="module")
def ready(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository that can be released on TODAY."""
    root = tmp_path_factory.mktemp("ready")
    for name in (*script.VERSION_FILES, "CHANGELOG.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} (2026-12-01)\n\n## 0.0.1 (2020-01-01)\n")
    git(root, "init", "--quiet", ".")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "all")
    return root


@pytest.fixture
def checkout(script: ModuleType, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that repository; the script's build steps are replaced."""
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(name, "a")
    for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")
    monkeypatch.setattr(script, "build", lambda root, _: [root / "wheelhouse" / "one.whl"])
    monkeypatch.setattr(script, "check_wheels", lambda _root, _wheels, _pythons: None)
    return Path(shutil.copytree(ready, tmp_path / "checkout"))


def test_a_release_makes_the_tag(script: ModuleType, checkout: Path) -> None:
    assert set(script.versions(ROOT).values()) == {VERSION}
    script.release(checkout, TODAY, [sys.executable], is_dry=False)
    assert git(checkout, "tag", "--list", "-n1").split() == [f"v{VERSION}", "multiring", VERSION]
    with pytest.raises(script.ReleaseError, match=rf"^the tag v{VERSION} exists: raise the version"):
        script.release(checkout, TODAY, [sys.executable], is_dry=False)


def test_a_dry_run_makes_no_tag(script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.release(checkout, TODAY, [sys.executable], is_dry=True)
    assert git(checkout, "tag") == ""
    assert "built and checked: wheelhouse/one.whl\ndry run: everything passed; no tag" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new", "match"),
    [
        ("CITATION.cff", f"version: {VERSION}", "version: 9.9", f"CITATION.cff states version 9.9: want {VERSION}"),
        ("packaging/conda/recipe.yaml", f'"{VERSION}"', '"9.9"', "recipe.yaml states version 9.9"),
        ("src/multiring/_version.py", VERSION, "9.9", "first heading is .*: want '9.9 "),
        ("CHANGELOG.md", "(2026-12-01)", "(unreleased)", r"heading is '.* \(unreleased\)': want '.* \(2026-12-01\)'"),
        ("CHANGELOG.md", "## ", "# ", "first heading is nothing"),
        ("CITATION.cff", "\nversion: ", "\nversions: ", "CITATION.cff states no version"),
    ],
)
def test_what_forbids_a_release_is_named(
    script: ModuleType, checkout: Path, name: str, old: str, new: str, match: str
) -> None:
    text = (checkout / name).read_text(encoding="utf-8")
    assert old in text
    (checkout / name).write_text(text.replace(old, new))
    git(checkout, "commit", "--quiet", "--all", "-m", "changed")
    for is_dry in (False, True):
        with pytest.raises(script.ReleaseError, match=match):
            script.release(checkout, TODAY, [sys.executable], is_dry=is_dry)
    assert git(checkout, "tag") == ""


def test_a_dry_run_lists_all_problems_before_it_builds(
    script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "build", lambda _root, pythons: sys.stdout.write(f"builds with {pythons}\n") and [])
    (checkout / "left.txt").write_text("")
    with pytest.raises(script.ReleaseError, match=r"left\.txt\npython9\.1: not found"):
        script.release(checkout, TODAY, ["python9.1", sys.executable], is_dry=True)
    plan, stops, lost, built = re.split("^(?=dry run: would stop|builds)", capsys.readouterr().out, flags=re.MULTILINE)
    assert plan == f"dry run: would build multiring {VERSION}: an sdist, and a wheel for each of {sys.executable}\n"
    assert "git status lists changes" in stops
    assert "python9.1: not found" in lost
    assert built == f"builds with ['{sys.executable}']\n"


def test_changes_and_missing_interpreters_forbid_a_release(script: ModuleType, checkout: Path) -> None:
    with pytest.raises(script.ReleaseError, match=r"python9\.1: not found on PATH"):
        script.release(checkout, TODAY, ["python9.1"], is_dry=False)
    broken = checkout.parent / "python9.2"
    broken.write_text("#!/bin/sh\necho no version 9.2 >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(script.ReleaseError, match=r"python9\.2 does not run \(no version 9\.2\); mend it"):
        script.release(checkout, TODAY, [str(broken)], is_dry=False)
    (checkout / "left.txt").write_text("")
    with pytest.raises(script.ReleaseError, match=r"git status lists changes: .*\n\?\? left\.txt"):
        script.release(checkout, TODAY, [sys.executable], is_dry=False)
    assert git(checkout, "tag") == ""


def test_a_command_that_fails_is_named(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.ReleaseError, match=r"^false failed with exit code 1; its output is above"):
        script.run("false", cwd=tmp_path)
