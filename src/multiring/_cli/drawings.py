"""Draw plans and timelines as SVG figures, for pages and reports."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from multiring._replacing import replace_file, require_replaceable
from multiring._schedule import Kind
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner import Plan
from multiring.trace import read_timeline_file

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
_SHADES = {"forward": "#7fb3e0", "backward": "#f2a65a", "optimizer": "#7cc47f", "wait": "#d9d9d9", "agree": "#e8e1f3"}
_OPERATION, _REDUCE = "#b39ddb", "#7e57c2"
_ROW, _LEFT, _WIDTH = 22, 150, 960
# Slices within an operation's slice. They are not drawn as separate slices.
_WITHIN = ("agree", "wire", "reduce")
_MARK = 'class="multiring"'  # marks a file as a drawing of multiring


def check_figure(path: Path) -> None:
    """Raise ArgumentError if a figure clearly cannot be written to `path`.

    Only the name, the folder and an existing file are checked.
    """
    if path.suffix != ".svg" or not path.absolute().parent.is_dir():
        raise ArgumentError(f"cannot draw to {path}: want a name that ends with .svg, in an existing folder")
    try:
        require_replaceable(path, is_ours=_is_drawing, what="a drawing")
    except OSError as error:
        raise ArgumentError(f"cannot draw to {path}: {error.strerror}") from None


def write_figure(path: Path, drawing: str) -> None:
    """Write a drawing to `path`. It may replace an older drawing.

    Raises:
        ArgumentError: a file that is not a drawing is at `path`, or the file cannot be written.
    """
    try:
        replace_file(path, drawing.encode(), is_ours=_is_drawing, what="a drawing")
    except OSError as error:
        raise ArgumentError(f"cannot draw to {path}: {error.strerror}") from None


def _is_drawing(data: bytes) -> bool:
    return data.startswith(b"<svg ") and _MARK.encode() in data.partition(b"\n")[0]


def rings(plan: Plan, topology: Topology) -> str:
    """Return a drawing of the sends in `plan`.

    It shows hosts with their ranks, and arrows with one colour for each axis.
    """
    hosts = topology.hosts
    columns = math.ceil(math.sqrt(len(hosts)))
    most = max(map(len, hosts))
    width, height = 90 + 60 * most, 110
    places: dict[int, tuple[float, float]] = {}
    body: list[str] = []
    for number, ranks in enumerate(hosts):
        row, column = divmod(number, columns)
        column = columns - 1 - column if row % 2 else column  # every second row runs backwards, as rings of hosts do
        x, y = 20.0 + column * (width + 50), 50.0 + row * (height + 50)
        name = topology.names[number] if number < len(topology.names) else f"host {number}"
        body.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f4f6f8" stroke="#90a4ae"/>')
        body.append(_text(x + 8, y + 16, name, size=12, colour="#546e7a"))
        places |= {rank: (x + 75 + 60 * at, y + height / 2 + 8) for at, rank in enumerate(ranks)}
    schedule = plan.schedule
    for (source, target), axis in sorted(_edges(plan).items()):
        body.append(_arrow(places[source], places[target], _COLOURS[axis % len(_COLOURS)]))
    for rank, (x, y) in places.items():
        body.append(f'<circle cx="{x}" cy="{y}" r="15" fill="white" stroke="#37474f" stroke-width="1.5"/>')
        body.append(_text(x, y + 4, str(rank), size=12, anchor="middle"))
    rows = math.ceil(len(hosts) / columns)
    bottom = 50 + rows * (height + 50)
    body.append(_text(20, 28, str(schedule), size=14))
    for axis, size in enumerate(schedule.grid):
        body.append(_text(20 + 210 * axis, bottom - 8, f"axis {axis + 1}: {size} ranks a line", 12, _COLOURS[axis % 4]))
    return _svg(max(40 + columns * (width + 50) - 50, 20 + 210 * len(schedule.grid)), bottom + 10, body)


def _edges(plan: Plan) -> dict[tuple[int, int], int]:
    """Return (sender, receiver) -> axis for every send; the axis is the first in which the two positions differ."""
    schedule = plan.schedule
    position = {rank: at for at, rank in enumerate(schedule.order)}
    found = {}
    for rank in range(schedule.ranks):
        for move in schedule.moves_of(rank).rows():
            for peer in move.peers if move.kind is Kind.SEND else ():
                one, other = position.get(rank, 0), position.get(peer, 0)
                axis = 0
                for axis, size in enumerate(schedule.grid):  # noqa: B007 -- the loop leaves the last axis if no earlier one differs
                    if one % size != other % size:
                        break
                    one, other = one // size, other // size
                found[rank, peer] = axis
    return found


def timeline(path: Path, steps: int) -> str:
    """Return a drawing of the last `steps` steps in the timeline at `path`.

    The drawing has one row for each thread of a rank.

    Raises:
        ArgumentError: the file is not a timeline, or has too few steps.
    """
    events = read_timeline_file(path).events
    slices = [each for each in events if each.get("ph") == "X" and each["name"] not in _WITHIN]
    ends = sorted(each["ts"] + each["dur"] for each in slices if each["pid"] == 0 and _kind(each) == "optimizer")
    if len(ends) <= steps:
        raise ArgumentError(f"{path} has {len(ends)} steps of an optimizer on rank 0; want more than {steps} to draw")
    start, end = ends[-steps - 1], ends[-1]
    if start == end:
        raise ArgumentError(f"{path}: the last {steps} steps take no time; want the timeline of a real run")
    shown = [each for each in slices if each["ts"] < end and each["ts"] + each["dur"] > start]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = sorted({(each["pid"], each["tid"]) for each in shown})
    scale = _WIDTH / (end - start)
    body = [_text(10, 24, f"{steps} steps, {(end - start) / 1000:.1f} ms", size=14)]
    for at, row in enumerate(rows):
        y = 40 + at * _ROW
        title = f"{ranks[row[0]].partition(',')[0]}: {names.get(row, '')}"
        body.append(_text(10, y + 15, title, size=11, colour="#546e7a"))
        # Draw longer slices first. A slice within another slice is then drawn over it.
        for each in sorted((e for e in shown if (e["pid"], e["tid"]) == row), key=lambda e: -e["dur"]):
            left = max(each["ts"] - start, 0) * scale
            right = min(each["ts"] + each["dur"] - start, end - start) * scale
            body.append(_slice(_LEFT + left, y, max(right - left, 0.6), each))
        body += [_work(y, scale, start, end, e) for e in events if _is_work(e, row) and start < e["ts"] < end]
    return _svg(_LEFT + _WIDTH + 20, 50 + len(rows) * _ROW, body)


def _kind(event: dict[str, Any]) -> str:
    return str(event["name"]).partition(" ")[0]


def _is_work(event: dict[str, Any], row: tuple[int, int]) -> bool:
    return event.get("ph") == "X" and event["name"] == "reduce" and (event["pid"], event["tid"]) == row


def _slice(x: float, y: float, width: float, event: dict[str, Any]) -> str:
    name = str(event["name"])
    colour = _SHADES.get(_kind(event), _OPERATION)
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}" stroke="white" stroke-width="0.5">'
    )
    label = _text(x + 3, y + 13, name, size=10) if width > 6.2 * len(name) else ""
    return f"{box}<title>{escape(name)}, {event['dur']:.0f} us</title></rect>{label}"


def _work(y: float, scale: float, start: float, end: float, event: dict[str, Any]) -> str:
    left, width = (event["ts"] - start) * scale, (min(event["ts"] + event["dur"], end) - event["ts"]) * scale
    return f'<rect x="{_LEFT + left:.1f}" y="{y + 14}" width="{max(width, 0.6):.1f}" height="4" fill="{_REDUCE}"/>'


def _arrow(source: tuple[float, float], target: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = source, target
    far = math.hypot(x2 - x1, y2 - y1)
    ux, uy = (x2 - x1) / far, (y2 - y1) / far
    # The arrow runs from rim to rim and bends to its left. So arrows in both directions are visible, and an arrow
    # passes beside the ranks between its ends.
    bend = 10 + 0.12 * far
    middle = ((x1 + x2) / 2 + uy * bend, (y1 + y2) / 2 - ux * bend)
    ends = []
    for x, y in ((x1, y1), (x2, y2)):
        length = math.hypot(middle[0] - x, middle[1] - y)
        ends.append((x + (middle[0] - x) / length * 17, y + (middle[1] - y) / length * 17))
    (ax, ay), (bx, by) = ends
    path = f"M{ax:.1f} {ay:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {bx:.1f} {by:.1f}"
    tip = math.atan2(by - middle[1], bx - middle[0])
    wings = [(bx - 8 * math.cos(tip + turn), by - 8 * math.sin(tip + turn)) for turn in (0.4, -0.4)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(bx, by), *wings])
    line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    return f'{line}<polygon points="{points}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int = 12, colour: str = "#263238", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text {place} font-family="sans-serif">{escape(text)}</text>'


def _svg(width: float, height: float, body: Sequence[str] | Iterable[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    background = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {_MARK} {size}>', background, *body, "</svg>", ""])
