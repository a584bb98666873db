"""Compare an exported model's answers with the trained model's, picture by picture, and their metrics."""

from dataclasses import dataclass

import numpy as np

from multiring.errors import DataError
from multiring.vision.labels import Box, Mask
from multiring.vision.models.answers import Prediction

MOST_POINTS, LEAST_EQUAL, MOST_DIFFERENCE = 0.1, 0.999, 1e-3
_SAME_BOX = 0.95  # the overlap of two boxes that are one answer


@dataclass(kw_only=True)
class AnswerComparison:
    """Counts the equal answers of two models.

    Attributes:
        pictures: the pictures that were added.
        largest_difference: the largest difference of a probability; 0 for kinds without probabilities.
    """

    pictures: int = 0
    largest_difference: float = 0.0
    _equal: float = 0.0
    _compared: float = 0.0
    _first: str = ""

    def add(self, what: str, expected: Prediction, found: Prediction) -> None:
        """Add a picture.

        Args:
            what: the picture's path for error messages.
            expected: the trained model's answer.
            found: the exported model's answer.
        """
        self.pictures += 1
        equal, compared = equal_answers(expected, found)
        self._equal += equal
        self._compared += compared
        if equal < compared and not self._first:
            self._first = f"{what}: {_told(found)} in place of {_told(expected)}"

    def figures(self, of_model: float, of_export: float) -> dict[str, float]:
        """Return the figures for the JSON file.

        Args:
            of_model: the trained model's metric in percent.
            of_export: the exported model's.

        Raises:
            DataError: the metrics differ by more than 0.1 points, fewer than 99.9 % of the answers are equal, or a
                probability differs by more than 0.001.
        """
        equal = self._equal / self._compared if self._compared else 1.0
        problems = []
        if not abs(of_model - of_export) <= MOST_POINTS:
            problems.append(f"the metric is {of_export:.2f} % and the trained model's {of_model:.2f} %")
        if not equal >= LEAST_EQUAL:
            problems.append(f"{equal:.2%} of the answers are equal, the first that is not: {self._first}")
        if not self.largest_difference <= MOST_DIFFERENCE:
            problems.append(f"a probability differs by {self.largest_difference:.2g}")
        if problems:
            raise DataError(
                f"the exported model does not answer as the trained one on {self.pictures} pictures: "
                f"{'; '.join(problems)}. Want at most {MOST_POINTS} points, at least {LEAST_EQUAL:.1%} and at most "
                f"{MOST_DIFFERENCE:g}; no file was written"
            )
        return {
            "pictures": self.pictures,
            "metric_of_model": of_model,
            "metric_of_export": of_export,
            "equal_answers": equal,
            "largest_difference": self.largest_difference,
        }


def _told(answer: Prediction) -> str:
    return ", ".join(sorted({each.class_name for each in answer.labels})) or "nothing"


def equal_answers(expected: Prediction, found: Prediction) -> tuple[float, float]:
    """Return how many of a picture's answers are equal, and of how many.

    They are pixels for masks, boxes for boxes, and one for a picture's classes or if nothing was found.
    """
    labels = (*expected.labels, *found.labels)
    if masks := [each for each in labels if isinstance(each, Mask)]:
        differs = np.zeros((masks[0].pixels.height, masks[0].pixels.width), bool)
        for name in {each.class_name for each in masks}:
            differs |= _pixels(expected, name, differs.shape) ^ _pixels(found, name, differs.shape)
        return float(differs.size - np.count_nonzero(differs)) / differs.size, 1.0
    if any(isinstance(each, Box) for each in labels):
        return 2.0 * _matched(expected, found), float(len(labels))
    return float(expected.labels == found.labels), 1.0


def _pixels(answer: Prediction, name: str, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    whole = np.zeros(shape, bool)
    for each in answer.labels:
        if isinstance(each, Mask) and each.class_name == name:
            whole |= each.pixels.pixels()
    return whole


def _matched(expected: Prediction, found: Prediction) -> int:
    """Return how many boxes have one of the same class in nearly the same place."""
    left = [each for each in found.labels if isinstance(each, Box)]
    matched = 0
    for box in expected.labels:
        overlaps = [_overlap(box, each) if isinstance(box, Box) else 0.0 for each in left]
        if overlaps and max(overlaps) >= _SAME_BOX:
            left.pop(int(np.argmax(overlaps)))
            matched += 1
    return matched


def _overlap(one: Box, other: Box) -> float:
    """Return the area of the intersection by the area of the union; 0 for boxes of different classes."""
    if one.class_name != other.class_name:
        return 0.0
    width = min(one.left + one.width, other.left + other.width) - max(one.left, other.left)
    height = min(one.top + one.height, other.top + other.height) - max(one.top, other.top)
    common = max(0.0, width) * max(0.0, height)
    return common / (one.width * one.height + other.width * other.height - common)
