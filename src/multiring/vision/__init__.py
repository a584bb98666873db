"""Labelled pictures: a project folder, labels with their history, and how pictures are read."""

from multiring._former_names import keep_to_public_names
from multiring.vision.labels import Box, Label, Mask, Polygon
from multiring.vision.pictures import Picture, decode_picture, read_picture
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.records import ImageRecord, Labelling, ScanResult
from multiring.vision.run_lengths import RunLengths, run_lengths_of

__all__ = [
    "Box",
    "ImageRecord",
    "Label",
    "Labelling",
    "Mask",
    "Picture",
    "Polygon",
    "RunLengths",
    "ScanResult",
    "VisionProject",
    "decode_picture",
    "read_picture",
    "run_lengths_of",
]

keep_to_public_names(__name__)
