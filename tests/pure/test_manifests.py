"""`multiring manifest`: what the manifests say, their validity for each system, and bad input."""

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as some
from tests.support.mpi_job_fields import mistakes_of
from tests.support.pod_cluster import expanded, job_of

from multiring import _cli as cli
from multiring._launch.torchrun_variables import torchrun_nodes
from multiring._manifests import SYSTEMS, yaml_of
from multiring._runtime.bootstrap.launchers import identify
from multiring._settings import Settings, foreign_environment

COMMON = ("--pods", "3", "--ranks-per-pod", "2", "--image", "registry.example:5000/team/train:1")
FULL = (
    *("--name", "digits", "--namespace", "ml", "--gpus", "4", "--cpus", "8", "--memory", "16Gi", "--shm", "2Gi"),
    *("--max-restarts", "2", "--grace", "60", "--env", "LR=0.1", "--volume", "results:/results", "--port", "30000"),
)
# Kubernetes serves its three newest versions; podFailurePolicy is part of Job since 1.31 without a feature gate.
VERSIONS = ("1.31", "1.34", "1.37")


def made(system: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the documents that the command writes, and its words on standard error."""
    assert cli.main(["manifest", system, *words]) == 0
    done = capsys.readouterr()
    return list(yaml.safe_load_all(done.out)), done.err


def pods_in(document: Any) -> list[dict[str, Any]]:
    """Return the specifications of pods in a document."""
    if isinstance(document, list):
        return [pod for each in document for pod in pods_in(each)]
    if not isinstance(document, dict):
        return []
    own = [document] if "containers" in document else []
    return own + [pod for each in document.values() for pod in pods_in(each)]


@pytest.mark.parametrize("options", [(), FULL], ids=["plain", "full"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_manifests_are_valid(system: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    documents, _ = made(system, *COMMON, *options, "--", "python", "train.py", capsys=capsys)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": each} for each in pods_in(documents)
    ]
    assert pods
    native = [each for each in documents if each["apiVersion"] in ("v1", "batch/v1")]
    assert len(native) == (2 if system == "kubernetes" else 0)
    for version in VERSIONS:
        for each in (*pods, *native):
            validator.validate(each, version, strict=True)


def test_the_validation_finds_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    (_, job), _ = made("kubernetes", *COMMON, "--", "true", capsys=capsys)
    job["spec"]["template"]["spec"]["containers"][0]["programme"] = ["true"]
    with pytest.raises(validator.ValidationError):
        validator.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("options", [(), FULL], ids=["plain", "full"])
def test_kubeflow_knows_every_field(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    (runtime, job), _ = made("kubeflow", *COMMON, *options, "--", "python", "train.py", capsys=capsys)
    for document, model in ((runtime, models.TrainerV1alpha1TrainingRuntime), (job, models.TrainerV1alpha1TrainJob)):
        # The models leave out fields that they do not know.
        assert model.from_dict(document).to_dict() == document
    job["spec"]["trainer"]["numNode"] = 3
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job
    template = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    indexed = {**template, "completionMode": "Indexed", "completions": 3, "parallelism": 3}
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": indexed}
    validator.validate(whole, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("options", [(), FULL, ("--pods", "1")], ids=["plain", "full", "one pod"])
def test_the_mpi_operator_knows_every_field(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    [job], _ = made("mpi-operator", *COMMON, *options, "--", "python", "train.py", capsys=capsys)
    assert mistakes_of(job) == []
    assert ("Worker" in job["spec"]["mpiReplicaSpecs"]) == ("1" not in options)


def test_mistakes_of_an_mpi_job_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    [job], _ = made("mpi-operator", *COMMON, "--", "true", capsys=capsys)
    spec = job["spec"]
    spec["slots"] = 2
    spec["mpiImplementation"] = "OpenMpi"
    spec["runPolicy"] = {"backoffLimit": -1}
    spec["mpiReplicaSpecs"]["Worker"]["restartPolicy"] = "Always"
    spec["mpiReplicaSpecs"]["Launcher"]["replicas"] = True
    assert mistakes_of(job) == [
        "spec.slots is unknown",
        "spec.mpiImplementation is 'OpenMpi'",
        "spec.runPolicy.cleanPodPolicy is missing",
        "spec.runPolicy.backoffLimit is -1",
        "spec.mpiReplicaSpecs.Launcher.replicas is True",
        "spec.mpiReplicaSpecs.Worker.restartPolicy is 'Always'",
    ]


@pytest.mark.parametrize(
    ("system", "hosts", "place"),
    [
        ("kubernetes", "digits-{}", "--nodes 3 --node-rank {} --meet digits-0.digits:30000 -n 2 "),
        ("kubeflow", "digits-node-0-{}", ""),
        ("mpi-operator", "digits-worker-{}", "--nodes 3 --node-rank {} --meet digits-launcher.digits:30000 -n 2 "),
    ],
)
def test_pods_run_the_command(system: str, hosts: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("python", "train.py", "--lr", "0.1", "$(HOME)", "$$", "a b", "--", "$")
    documents, _ = made(system, *COMMON, *FULL, "--", *words, capsys=capsys)
    job = job_of(documents)
    for index, pod in enumerate(job.pods):
        numbered = ["digits-launcher", hosts.format(0), hosts.format(1)] if system == "mpi-operator" else None
        assert pod.host == (hosts.format(index) if numbered is None else numbered[index])
        told = f"multiring run {place.format(index)}--grace 60 --max-restarts 2 --".split()
        assert pod.command() == [*told, *words]
        environment = pod.environment()
        assert environment["LR"] == "0.1"
        assert environment.items() >= {"MULTIRING_SECRET_FILE": "/run/multiring/secret"}.items()
        assert pod.spec["terminationGracePeriodSeconds"] > 60
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.container["securityContext"]["readOnlyRootFilesystem"]
        amounts = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "4"}
        assert pod.container["resources"] == {"requests": amounts, "limits": amounts}
        [shared] = [each["emptyDir"] for each in pod.spec["volumes"] if each["name"] == "shared-memory"]
        assert shared == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_an_index_alone_makes_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that are independent of each other have an index, too, and must not wait for each other."""
    environment = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits-1"}
    assert torchrun_nodes(environment) is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    found = identify(Settings.from_environment(environment), foreign_environment(environment))
    assert (found.rank, found.size) == (0, 1)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_secret_is_told_and_not_written(
    system: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIRING_SECRET", "of this shell")
    documents, told = made(system, *COMMON, "--namespace", "ml", "--", "true", capsys=capsys)
    assert "of this shell" not in str(documents) + told
    assert "Secret" not in {document["kind"] for document in documents}
    create = "kubectl create secret generic train-secret --namespace ml --from-file=secret=/dev/stdin"
    assert f"head -c 32 /dev/urandom | base64 | {create}" in told
    for pod in pods_in(documents):
        [secret] = [each["secret"] for each in pod["volumes"] if "secret" in each]
        assert secret["secretName"] == "train-secret"
        assert secret["defaultMode"] & 0o007 == 0, "other users of the pod must not read it"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--pods", "0"), "--pods 0: want a whole number, 1 to 100000"),
        (("--ranks-per-pod", "0"), "--ranks-per-pod 0: want a whole number, 1 to 100000"),
        (("--image", ""), "no image: want the container image"),
        (("--image", "Team/Train"), "'Team/Train' as an image: want REGISTRY/PATH:TAG"),
        (("--image", "team/train:"), "'team/train:' as an image"),
        (("--name", "Digits"), "'Digits' as the job's name: want lower-case letters"),
        (("--name", "1digits"), "'1digits' as the job's name"),
        (("--name", "digits-"), "'digits-' as the job's name"),
        (("--name", "a_b"), "'a_b' as the job's name"),
        (("--name", ""), "'' as the job's name"),
        (("--name", "n" * 64), "Kubernetes allows 63; want at most "),
        (("--namespace", "My-Space"), "'My-Space' as a namespace: want at most 63 lower-case letters"),
        (("--secret", "a/b"), "'a/b' as a Secret's name"),
        (("--gpus", "1"), "2 ranks in each pod and 1 GPUs for each pod"),
        (("--gpus", "3"), "want as many ranks as GPUs, 3, or a divisor of that"),
        (("--gpus", "-1"), "--gpus -1: want a whole number, 0 to"),
        (("--cpus", "many"), "'many' CPUs for each pod: want a number above 0"),
        (("--cpus", "0"), "'0' CPUs for each pod: want a number above 0"),
        (("--memory", "16GiB"), "'16GiB' for memory: want a size like 16Gi"),
        (("--memory", "1Gi", "--shm", "1Gi"), "shm counts towards the pod's memory"),
        (("--shm", "0"), "'0' for /dev/shm: want a size"),
        (("--max-restarts", "-1"), "--max-restarts -1: want a whole number, 0 to"),
        (("--grace", "-1"), "--grace -1: want a whole number, 0 to"),
        (("--port", "80"), "--port 80: want a whole number, 1024 to 65535"),
        (("--env", "LR"), "--env 'LR': want NAME=VALUE"),
        (("--env", "A B=1"), "--env 'A B': want a variable's name"),
        (("--env", "MULTIRING_SECRET=x"), "--env MULTIRING_SECRET: the launcher gives each rank its own"),
        (("--env", "MULTIRING_SECRET_FILE=x"), "--env MULTIRING_SECRET_FILE: the launcher gives each rank"),
        (("--env", "JOB_COMPLETION_INDEX=1"), "--env JOB_COMPLETION_INDEX: the pods' system sets this variable"),
        (("--env", "REPLICA_INDEX=1"), "--env REPLICA_INDEX: the pods' system sets this variable"),
        (("--env", "PET_NNODES=4"), "--env PET_NNODES: the pods' system sets this variable"),
        (("--env", "NOTE=a\udcffb"), "the value of --env NOTE is not UTF-8"),
        (("--pods", "100001"), "--pods 100001: want a whole number, 1 to 100000"),
        (("--ranks-per-pod", "1000000000000"), "--ranks-per-pod 1000000000000: want a whole number, 1 to 100000"),
        (("--max-restarts", "1000000000"), "1000000000 restarts of 3 pods: Kubernetes counts lost pods up to"),
        (("--grace", "86401"), "a grace of 86401 s: want 0 to 86400 s"),
        (("--memory", "9" * 400), "for memory: want a size like 16Gi"),
        (("--memory", "9" * 40), "for memory: want a size like 16Gi"),
        (("--cpus", "9" * 400), "CPUs for each pod: want a number above 0"),
        (("--gpus", "9000000000"), "--gpus 9000000000: want a whole number, 0 to 2147483647"),
        (("--volume", "a:/run//multiring"), "'/run//multiring' as the folder of the volume a"),
        (("--volume", "a:/x/../run/multiring"), "'/x/../run/multiring' as the folder of the volume a"),
        (("--volume", "a:/x", "--volume", "b:/./x/"), "'/./x/' as the folder of the volume b"),
        (("--volume", "a://"), "'//' as the folder of the volume a"),
        (("--volume", "é:/x"), "'é' as a volume's claim"),
        (("--name", "é"), "'é' as the job's name"),
        (("--image", "r.example/t@sha256:12"), "'r.example/t@sha256:12' as an image"),
        (("--image", "r.example/t:1 "), "'r.example/t:1 ' as an image"),
        (("--env", "RANK=1"), "--env RANK: the launcher gives each rank its own RANK"),
        (("--env", "MULTIRING_ENGINES=tcp"), "unknown setting MULTIRING_ENGINES='tcp'; did you mean"),
        (("--volume", "results"), "--volume 'results': want CLAIM:FOLDER"),
        (("--volume", "a:/x", "--volume", "a:/y"), "with each claim once"),
        (("--volume", "results:out"), "'out' as the folder of the volume results: want an absolute path"),
        (("--volume", "results:/tmp/"), "'/tmp/' as the folder of the volume results"),
        (("--volume", "a:/x", "--volume", "b:/x"), "'/x' as the folder of the volume b"),
        (("--volume", "A:/x"), "'A' as a volume's claim"),
        (("--env", "NOTE=a\0b"), "the value of --env NOTE has a NUL character"),
        (("--volume", "a:/x\0y"), "the folder '/x\\x00y' of the volume a has a NUL character"),
        (("--volume", "a:/proc"), "'/proc' as the folder of the volume a: it would cover"),
        (("--volume", "a:/sys/fs"), "'/sys/fs' as the folder of the volume a: it would cover"),
        (("--volume", "a:/dev"), "'/dev' as the folder of the volume a: it would cover"),
        (("--volume", "a:/run"), "'/run' as the folder of the volume a: it would cover"),
        (("--volume", "a:/run/multiring/x"), "'/run/multiring/x' as the folder of the volume a: it would cover"),
    ],
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_bad_input_is_named(
    system: str, words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["manifest", system, *COMMON, *words, "--", "true"]) == 2
    done = capsys.readouterr()
    assert error in done.err
    assert done.out == ""


@pytest.mark.parametrize("words", [(), ("--",), ("--", "")])
def test_an_empty_command_is_named(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", "kubernetes", *COMMON, *words]) == 2
    assert "no command to run: want a program for the ranks, behind --" in capsys.readouterr().err


def test_a_command_that_is_no_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", "kubernetes", *COMMON, "--", "python", "a\udcff.py"]) == 2
    assert "the word 'a\\udcff.py' of the command is not UTF-8" in capsys.readouterr().err


def test_a_command_with_a_nul_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", "kubernetes", *COMMON, "--", "python", "a\0.py"]) == 2
    assert "the word 'a\\x00.py' of the command has a NUL character" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["TOKEN=s3cret\udcff", "TOKEN=s3cret\0", "PET_X=s3cret", "MULTIRING_RANK=s3cret"])
def test_errors_do_not_show_the_values_of_variables(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", "kubernetes", *COMMON, "--env", word, "--", "true"]) == 2
    told = capsys.readouterr().err
    assert "s3cret" not in told
    assert f"--env {word.partition('=')[0]}" in told


@pytest.mark.parametrize("system", SYSTEMS)
def test_odd_values_arrive_as_they_are(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    word = 'it\'s "quoted" $(HOME) $$ \\ \n\t# : é😀 \ufffe\x85\x7f - yes'
    image = f"registry.example:5000/team/train:1@sha256:{'0a' * 32}"
    odd = ["--image", image, "--env", f"NOTE={word}", "--env", "HOME=/home/me", "--env", "EMPTY="]
    documents, _ = made(system, *COMMON, *odd, "--", "python", word, "", "true", capsys=capsys)
    for pod in pods_in(documents):
        [container] = pod["containers"]
        assert container["image"] == image
        assert [each.replace("$$", "$") for each in container["command"][-3:]] == [word, "", "true"]
        names = [each["name"] for each in container["env"]]
        assert len(names) == len(set(names)), "Kubernetes refuses a variable that is there twice"
        found = {each["name"]: each.get("value") for each in container["env"]}
        assert found["NOTE"].replace("$$", "$") == word
        assert (found["HOME"], found["EMPTY"]) == ("/home/me", "")
        validator.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}, VERSIONS[-1], strict=True
        )


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_longest_name_fits(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["manifest", system, *COMMON, "--name", "n" * 64, "--", "true"]) == 2
    found = re.search(r"want at most (\d+) characters", capsys.readouterr().err)
    assert found is not None
    most = int(found[1])
    documents, _ = made(system, *COMMON, "--name", "n" * most, "--", "true", capsys=capsys)
    assert max(len(pod.host) for pod in job_of(documents).pods) == 63
    assert cli.main(["manifest", system, *COMMON, "--name", "n" * (most + 1), "--", "true"]) == 2
    capsys.readouterr()


TEXTS = some.text(some.characters(codec="utf-8"), max_size=12) | some.sampled_from(
    (
        "yes",
        "No",
        "on",
        "null",
        "~",
        "1",
        "1e3",
        "0x10",
        "1_000",
        "2026-11-26",
        ".5",
        "a: b",
        "a #b",
        "- x",
        "é😀",
        "\x85",
        "\ufffe",
        "\uffff",
    )
)
VALUES = some.recursive(
    some.integers() | some.booleans() | TEXTS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(some.lists(some.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_yaml_reads_back_what_was_written(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(yaml_of(documents))) == documents


def test_references_are_expanded_as_the_kubelet_does() -> None:
    # Cases of third_party/forked/golang/expansion/expand_test.go of Kubernetes.
    variables = {"VAR_A": "A", "VAR_B": "B", "VAR_EMPTY": ""}
    cases = {
        "$(VAR_A)": "A",
        "___$(VAR_B)___": "___B___",
        "$$(VAR_A)": "$(VAR_A)",
        "$$$(VAR_A)": "$A",
        "$$$$": "$$",
        "$(VAR_C)": "$(VAR_C)",
        "$VAR_A": "$VAR_A",
        "foo$(VAR_EMPTY)bar": "foobar",
        "$(": "$(",
        "$": "$",
        "a$": "a$",
    }
    for word, wanted in cases.items():
        assert expanded(word, variables) == wanted, word
