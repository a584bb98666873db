"""Labelled pictures: a project folder, labels with their history, checks, splits, import and export."""

from multiring._former_names import keep_to_public_names
from multiring.vision.checks.checking import CheckFinding, CheckResult, check_project
from multiring.vision.checks.split_files import ProjectSplit, make_split, read_split
from multiring.vision.formats.exchange import ImportResult, export_labels, import_labels
from multiring.vision.formats.label_sets import LabelledPicture, LabelSet
from multiring.vision.labels import Box, Label, Mask, Polygon
from multiring.vision.pictures import Picture, decode_picture, read_picture
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.records import ImageRecord, Labelling, ScanResult
from multiring.vision.run_lengths import RunLengths, run_lengths_of

__all__ = [
    "Box",
    "CheckFinding",
    "CheckResult",
    "ImageRecord",
    "ImportResult",
    "Label",
    "LabelSet",
    "LabelledPicture",
    "Labelling",
    "Mask",
    "Picture",
    "Polygon",
    "ProjectSplit",
    "RunLengths",
    "ScanResult",
    "VisionProject",
    "check_project",
    "decode_picture",
    "export_labels",
    "import_labels",
    "make_split",
    "read_picture",
    "read_split",
    "run_lengths_of",
]

keep_to_public_names(__name__)
