"""A job of pods, and the checks of its names, numbers and resources."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from posixpath import normpath
from types import MappingProxyType

from multiring._launch.commands import refuse_places
from multiring._launch.job import JobOptions
from multiring._settings import Settings
from multiring.errors import ArgumentError

SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- the standard path of shared memory, in the pod
SCRATCH = "/tmp"  # noqa: S108 -- a volume of the pod
SECRET_FOLDER = "/run/multiring"  # noqa: S105 -- a folder's name
# Variables that tell a pod its number.
_PLACES = ("JOB_COMPLETION_INDEX", "REPLICA_INDEX")
_OWN_PATHS = ("/", SHARED_MEMORY, SCRATCH, SECRET_FOLDER)
_HIDING = ("/run", "/var/run")  # folders that contain the secret's
_SYSTEM_FOLDERS = ("/proc/", "/sys/", "/dev/", f"{SECRET_FOLDER}/")
_LABEL_CHARACTERS = 63
_SUBDOMAIN_CHARACTERS = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_CPUS = re.compile(r"[0-9]+(?:\.[0-9]{1,3})?|[0-9]+m")
# A reference to an image: a registry, a path of lower-case words, a tag and a digest. Source: the grammar of
# github.com/distribution/reference, reference.go.
_IMAGE = re.compile(
    r"(?:(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9.-]*[a-zA-Z0-9]|\[[0-9a-fA-F:]+\])(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[\w][\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
_DEFAULT_SHARED_MEMORY = "1Gi"
_MOST_BYTES = 2**63 - 1  # of a quantity of Kubernetes
_MOST_DIGITS = 64
_MOST_CPUS = 1_000_000
_MOST_PODS = 100_000  # Kubernetes' limit of an Indexed Job
_MOST_COUNT = 2**31 - 1  # of Kubernetes' fields of 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """What one pod gets.

    Args:
        gpus: the number of GPUs.
        cpus: the number of CPUs in Kubernetes' words, like 4, 0.5 or 500m. An empty text sets no limit.
        memory: the memory in Kubernetes' words, like 16Gi. An empty text sets no limit.
        shared_memory: the size of /dev/shm. It counts towards `memory`. Default: a quarter of `memory`, or 1 GiB.

    Raises:
        ArgumentError: a value is not a quantity, or /dev/shm does not fit into the memory.
    """

    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ArgumentError(f"{self.gpus} GPUs for each pod: want 0 or more")
        is_number = not self.cpus or _CPUS.fullmatch(self.cpus)
        if not is_number or (self.cpus and not 0 < float(self.cpus.rstrip("m")) <= _MOST_CPUS):
            raise ArgumentError(f"{self.cpus!r} CPUs for each pod: want a number above 0, like 4, 0.5 or 500m")
        if self.gpus > _MOST_COUNT:
            raise ArgumentError(f"{self.gpus} GPUs for each pod: want at most {_MOST_COUNT}")
        memory = bytes_of(self.memory, "memory") if self.memory else None
        shared = bytes_of(self.shared_memory_size, SHARED_MEMORY)
        if memory is not None and shared >= memory:
            raise ArgumentError(
                f"{self.shared_memory_size} for {SHARED_MEMORY} of {self.memory} memory: {SHARED_MEMORY} counts "
                "towards the pod's memory, so want less than that"
            )

    @property
    def shared_memory_size(self) -> str:
        """The size of /dev/shm, in Kubernetes' words."""
        if self.shared_memory or not self.memory:
            return self.shared_memory or _DEFAULT_SHARED_MEMORY
        return str(max(bytes_of(self.memory, "memory") // 4, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PodJob:
    """A job of `pods` pods with `ranks_per_pod` ranks each, which run `command`.

    Args:
        name: the job's name, an RFC 1035 label.
        image: a reference to the container image, which has multiring and the program.
        command: the program and its arguments, as the ranks get them.
        resources: the resources of each pod.
        namespace: the namespace, an RFC 1123 label. An empty text leaves it to kubectl.
        secret: the name of the Secret that has the job's secret. Default: NAME-secret.
        variables: the variables to set for the ranks, by name.
        volumes: the folder in the pods for each claim of a persistent volume.
        max_restarts: how often the job may be started again.
        grace_s: seconds for the ranks to save their work.
        port: the port of node 0 at which the launchers meet.

    Raises:
        ArgumentError: a name, a number or a reference is invalid, or the ranks of a pod do not fit its GPUs.
    """

    name: str
    image: str
    command: tuple[str, ...]
    pods: int
    ranks_per_pod: int
    resources: PodResources = field(default_factory=PodResources)
    namespace: str = ""
    secret: str = ""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    volumes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_restarts: int = 0
    grace_s: int = 30
    port: int = 29500

    def __post_init__(self) -> None:
        if not _SERVICE_LABEL.fullmatch(self.name):
            raise ArgumentError(
                f"{self.name!r} as the job's name: want lower-case letters, digits and '-', with a letter first and no "
                "'-' last (RFC 1035; the pods' host names and their service have this name)"
            )
        _check_name(self.namespace or "default", _LABEL, _LABEL_CHARACTERS, "a namespace", "RFC 1123 label")
        _check_name(self.secret_name, _SUBDOMAIN, _SUBDOMAIN_CHARACTERS, "a Secret's name", "RFC 1123 subdomain")
        if not self.image:
            raise ArgumentError("no image: want the container image of the pods, like registry.example/multiring:1")
        if not _IMAGE.fullmatch(self.image):
            raise ArgumentError(
                f"{self.image!r} as an image: want REGISTRY/PATH:TAG with a path of lower-case letters and digits, "
                "like registry.example/team/train:1"
            )
        if not self.command or not self.command[0]:
            raise ArgumentError("no command to run: want a program for the ranks, behind --")
        for word in self.command:
            _check_text(word, f"the word {word!r} of the command")
        self._check_numbers()
        self._check_places()

    @property
    def secret_name(self) -> str:
        """The name of the job's Secret."""
        return self.secret or f"{self.name}-secret"

    def check_host_name(self, longest: str) -> None:
        """Raise ArgumentError if the longest host name of a pod is too long for Kubernetes."""
        if len(longest) > _LABEL_CHARACTERS:
            most = len(self.name) - (len(longest) - _LABEL_CHARACTERS)
            raise ArgumentError(
                f"{self.name!r} as the job's name: a pod's host name would be {longest!r} with {len(longest)} "
                f"characters, and Kubernetes allows {_LABEL_CHARACTERS}; want at most {most} characters"
            )

    def _check_numbers(self) -> None:
        for count, what in ((self.pods, "pods"), (self.ranks_per_pod, "ranks in each pod")):
            if count < 1:
                raise ArgumentError(f"{count} {what}: want at least 1")
            if count > _MOST_PODS:
                raise ArgumentError(f"{count} {what}: want at most {_MOST_PODS}")
        gpus, ranks = self.resources.gpus, self.ranks_per_pod
        if gpus and gpus % ranks:
            raise ArgumentError(
                f"{ranks} ranks in each pod and {gpus} GPUs for each pod: the ranks cannot share the GPUs evenly; want "
                f"as many ranks as GPUs, {gpus}, or a divisor of that"
            )
        for number, what in ((self.max_restarts, "restarts"), (self.grace_s, "seconds of grace")):
            if number < 0:
                raise ArgumentError(f"{number} {what}: want 0 or more")
        JobOptions(grace_s=self.grace_s)  # the pods' own launchers would refuse it
        if self.pods * self.max_restarts > _MOST_COUNT:
            raise ArgumentError(
                f"{self.max_restarts} restarts of {self.pods} pods: Kubernetes counts lost pods up to {_MOST_COUNT}; "
                f"want at most {_MOST_COUNT // self.pods} restarts"
            )
        if not 1024 <= self.port <= 65535:  # a user who is not root may not use those below
            raise ArgumentError(f"port {self.port}: want 1024 to 65535")

    def _check_places(self) -> None:
        refuse_places(self.variables, horovod=False, timeline=False)
        Settings.from_environment(self.variables)
        for name, text in self.variables.items():
            if not _VARIABLE.fullmatch(name):
                raise ArgumentError(f"--env {name!r}: want a variable's name of letters, digits and '_'")
            if name in _PLACES or name.startswith("PET_"):
                raise ArgumentError(f"--env {name}: the pods' system sets this variable; leave it out")
            _check_text(text, f"the value of --env {name}")  # which may be a secret
        taken = set(_OWN_PATHS)
        for claim, path in self.volumes.items():
            _check_name(claim, _SUBDOMAIN, _SUBDOMAIN_CHARACTERS, "a volume's claim", "RFC 1123 subdomain")
            _check_text(path, f"the folder {path!r} of the volume {claim}")
            folder = f"/{normpath(path).lstrip('/')}"  # POSIX keeps two slashes at the beginning
            if not path.startswith("/") or ":" in path or ".." in path.split("/") or folder in taken:
                raise ArgumentError(
                    f"{path!r} as the folder of the volume {claim}: want an absolute path other than "
                    f"{', '.join(sorted(taken))}"
                )
            if folder in _HIDING or f"{folder}/".startswith(_SYSTEM_FOLDERS):
                raise ArgumentError(
                    f"{path!r} as the folder of the volume {claim}: it would cover or change a folder of the system, "
                    f"or that of the job's secret, {SECRET_FOLDER}; want a folder of your own, like /data"
                )
            taken.add(folder)


def bytes_of(quantity: str, what: str) -> int:
    """Return the bytes of a quantity in Kubernetes' words, like 16Gi.

    Raises:
        ArgumentError: it is not a quantity of at least one byte. The text names `what`.
    """
    match = _BYTES.fullmatch(quantity)
    size = int(Fraction(match[1]) * _UNITS[match[2]]) if match is not None and len(quantity) < _MOST_DIGITS else 0
    if not 1 <= size <= _MOST_BYTES:
        raise ArgumentError(f"{quantity!r} for {what}: want a size like 16Gi or 500M")
    return size


def _check_text(text: str, what: str) -> None:
    """Raise ArgumentError if `text` has bytes that are no UTF-8, or a NUL, which no manifest or program can take."""
    if "\0" in text:
        raise ArgumentError(f"{what} has a NUL character, which no program can take: want text without it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not UTF-8, and a manifest is: want text") from None


def _check_name(name: str, pattern: re.Pattern[str], most: int, what: str, rule: str) -> None:
    if not pattern.fullmatch(name) or len(name) > most:
        raise ArgumentError(
            f"{name!r} as {what}: want at most {most} lower-case letters, digits and '-', with a letter or digit first "
            f"and last ({rule})"
        )
