"""Show the result of a check, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiring._diagnosis.findings import HealthFinding
from multiring._diagnosis.readings import Readings

HEALTHY, FOUND, COULD_NOT_LOOK = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The result of a check: what was read, what is wrong, and how long it took."""

    readings: Readings
    findings: Sequence[HealthFinding]
    seconds: float

    @property
    def code(self) -> int:
        """The exit code: 0 healthy, 1 something is wrong, 2 something could not be looked at and nothing is wrong."""
        if self.findings:
            return FOUND
        return COULD_NOT_LOOK if self.readings.unread else HEALTHY


def as_json(report: HealthReport) -> dict[str, Any]:
    """Return the report as a JSON object, in SI base units."""
    return {
        "code": report.code,
        "seconds": round(report.seconds, 1),
        "findings": [finding_as_json(each) for each in report.findings],
        "unread": list(report.readings.unread),
        "hosts": [asdict(host) for host in report.readings.hosts],
        "pairs": [asdict(pair) for pair in report.readings.pairs],
    }


def finding_as_json(finding: HealthFinding) -> dict[str, Any]:
    """Return a finding as a JSON object."""
    return {**asdict(finding), "kind": finding.kind.value}


def as_text(report: HealthReport) -> str:
    """Return the report for a terminal."""
    hosts = report.readings.hosts
    ranks = sum(host.ranks for host in hosts)
    rates = [pair.bytes_per_s for pair in report.readings.pairs if pair.bytes_per_s is not None]
    timed = f", {len(rates)} links timed at {min(rates) * 8e-6:.4g} to {max(rates) * 8e-6:.4g} Mbit/s" if rates else ""
    looked = f"{_counted(len(hosts), 'host')}, {_counted(ranks, 'rank')}{timed}, {report.seconds:.0f} s"
    lines = findings_text(report.findings)
    lines += [f"could not look: {each}" for each in report.readings.unread]
    if not report.findings:
        lines.append(f"nothing is wrong: {looked}")
    else:
        lines.append(f"{_counted(len(report.findings), 'finding')}: {looked}")
    return "\n".join(lines)


def findings_text(findings: Sequence[HealthFinding]) -> list[str]:
    """Return lines about findings: what was found, how sure it is, and what to do."""
    lines = []
    for each in findings:
        lines.append(f"{each.kind.value} ({'certain' if each.is_certain else 'likely'}): {each.where}: {each.found}")
        lines.append(f"    do: {each.todo}")
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
