"""What the page reads and changes: pictures with their labels and proposals, edits, undo and tracks.

Each function opens the project, because an object of it belongs to one thread and each request may have another.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError, DataError, StateError
from multiring.vision.labelling.edits import apply_edits
from multiring.vision.labelling.proposals import Proposal, ProposalStore
from multiring.vision.labelling.tracks import filled, is_drawn, label_at, track_label
from multiring.vision.labels import Box, Label, Polygon, to_json
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.history import Labels
from multiring.vision.project.records import ImageRecord, Labelling


class LabellingStates:
    """The states of a project's pictures.

    Args:
        folder: the project's folder.
        proposals: what a model proposes.
    """

    def __init__(self, folder: Path, proposals: ProposalStore) -> None:
        self._folder = folder
        self._proposals = proposals

    def picture(self, path: str) -> dict[str, Any]:
        """Return a picture with its labels, the change that made them, and what is proposed.

        Raises:
            ArgumentError: the project has no such picture.
        """
        with VisionProject.open(self._folder) as project:
            return self._state(project, path)

    def _state(self, project: VisionProject, path: str) -> dict[str, Any]:
        image = project.image(path)
        found = project.labelling(path)
        labels = None if found is None else found.labels
        return {
            "path": image.path,
            "digest": image.digest,
            "problem": image.problem or ("the file is gone" if image.is_missing else ""),
            "width": image.width,
            "height": image.height,
            "group": image.group,
            "video": image.video,
            "frame": image.frame,
            "labels": None if labels is None else [to_json(each) for each in labels],
            "change": 0 if found is None else found.change,
            "author": "" if found is None else found.author,
            "time": "" if found is None else found.time,
            "proposals": [
                {"label": to_json(label), "score": score, "source": source}
                for label, score, source in self._proposed(project, image, labels)
            ],
        }

    def _proposed(
        self, project: VisionProject, image: ImageRecord, labels: Labels
    ) -> list[tuple[Label, float | None, str]]:
        """Return what a model and the video's tracks propose, each with a score, and "model" or "track"."""
        found: list[tuple[Label, float | None, str]] = []
        proposal: Proposal | None = self._proposals.proposal(image.digest)
        if proposal is not None and labels is None:
            found += [(label, score, "model") for label, score in zip(proposal.labels, proposal.scores, strict=True)]
        if image.video is not None and image.frame is not None:
            frames, labellings = _frames(project, image.video)
            for track in _tracks(frames, labellings):
                if any(each.track == track for each in labels or ()):
                    continue
                made = label_at(_drawn(frames, labellings, track), image.frame)
                if made is not None:
                    found.append((made, None, "track"))
        return found

    def edit(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Change a picture's labels as one change.

        Args:
            told: "path"; "digest" of the file that the author sees; "after", the number of the change that the author
                has seen last; "author"; "edits", as `apply_edits` takes them.

        Returns:
            The picture as of `picture`, with "corrections" and "accepted".

        Raises:
            ArgumentError: the project has no such picture or class, or there is no author.
            DataError: an edit or a label is malformed.
            StateError: somebody changed the picture since `after`, or it is another file.
        """
        path, author = _text(told, "path"), _text(told, "author")
        edits = told.get("edits")
        if not isinstance(edits, list):
            raise DataError(f"edits {str(edits)[:100]!r}: want a list")
        after, digest = _number(told, "after"), _text(told, "digest")
        with VisionProject.open(self._folder) as project:
            image = project.image(path)
            found = project.labelling(path)
            if (0 if found is None else found.change) != after:
                # The edits name labels by number, which mean others now.
                raise StateError(f"picture {path!r} was changed meanwhile: read it again")
            before = None if found is None else found.labels
            proposed = [label for label, _, _ in self._proposed(project, image, before)]
            edited = apply_edits(before, edits, proposed)
            if edited.labels != before:
                # Between this transaction and the reading above, `after` guards.
                project.set_labels(path, edited.labels, author, after=after, digest=digest)
            state = self._state(project, path)
        return {**state, "corrections": edited.corrections, "accepted": edited.accepted}

    def undo(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Take back a change: "change" of "author". Return the "paths" of its pictures."""
        number = told.get("change")
        with VisionProject.open(self._folder) as project:
            paths = project.undo(_text(told, "author"), None if number is None else _number(told, "change"))
        return {"paths": paths}

    def fill_track(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Label the frames of "video" between those in which people labelled "track", as one change of "author".

        Frames get the label of the track in addition to what they have, and keep it up to date: one that was computed
        before is computed anew.

        Returns:
            The number of changed "frames" and the number of the "change".

        Raises:
            ArgumentError: fewer than two frames have such a label.
            StateError: somebody changed one of the frames meanwhile; nothing was changed.
        """
        video, track, author = _text(told, "video"), _text(told, "track"), _text(told, "author")
        with VisionProject.open(self._folder) as project:
            frames, labellings = _frames(project, video)
            drawn = _drawn(frames, labellings, track)
            if len(drawn) < 2:
                raise ArgumentError(f"track {track!r} is stated in {len(drawn)} frames of {video!r}: want at least 2")
            made = filled(drawn, frozenset(frames))
            changed: dict[str, Labels] = {}
            for frame, label in made.items():
                path = frames[frame].path
                before = labellings[path].labels if path in labellings else None
                if before == ():
                    continue  # somebody has seen that nothing is in this frame
                before = before or ()
                after = (*(each for each in before if each.track != track), label)
                if set(after) != set(before):
                    changed[path] = after
            if not changed:
                return {"frames": 0, "change": 0}
            seen = {path: labellings[path].change if path in labellings else 0 for path in changed}
            number = project.set_many_labels(
                changed, author, after=seen, digests={each.path: each.digest for each in frames.values()}
            )
        return {"frames": len(changed), "change": number}


def _frames(project: VisionProject, video: str) -> tuple[dict[int, ImageRecord], dict[str, Labelling]]:
    """Return the frames of a video by number, and their labellings by path."""
    frames = {each.frame: each for each in project.frames_of(video) if each.frame is not None and each.is_usable}
    return frames, project.labellings(video=video)


def _tracks(frames: Mapping[int, ImageRecord], labellings: Mapping[str, Labelling]) -> Sequence[str]:
    found = {
        each.track: None
        for frame in sorted(frames)
        for each in (labellings[frames[frame].path].labels if frames[frame].path in labellings else None) or ()
        if each.track is not None and isinstance(each, Box | Polygon)
    }
    return list(found)


def _drawn(frames: Mapping[int, ImageRecord], labellings: Mapping[str, Labelling], track: str) -> dict[int, Label]:
    """Return the labels of a track that people stated, by the number of the frame."""
    return {
        frame: label
        for frame, image in frames.items()
        for label in (labellings[image.path].labels if image.path in labellings else None) or ()
        if track_label(label, track) and is_drawn(label)
    }


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > 4096:
        raise DataError(f"{name} {str(value)[:100]!r}: want a text of 1 to 4096 characters")
    return value


def _number(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise DataError(f"{name} {str(value)[:100]!r}: want a whole number of at least 0")
    return value
