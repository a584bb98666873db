"""The description and the task of a training, by its kind."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import multiring.torch as mt
from multiring.errors import ArgumentError
from multiring.training.checkpoints import Checkpoints
from multiring.training.devices import device_of
from multiring.vision.fitting.augmentation import AugmentationPolicy
from multiring.vision.fitting.classify_task import ClassifyTask
from multiring.vision.fitting.detect_task import DetectTask
from multiring.vision.fitting.fit_options import VisionOptions
from multiring.vision.fitting.fitted_head import HeadSamples, fit_head
from multiring.vision.fitting.fixed_parts import fix_norms, fix_resolutions
from multiring.vision.fitting.samples import PictureSamples, SampleOptions
from multiring.vision.fitting.segment_task import SegmentTask
from multiring.vision.fitting.targets import NOTHING, LabelledParts
from multiring.vision.models.architectures import DEVIATIONS, ENCODERS, HEADS
from multiring.vision.models.base_weights import BaseWeights, load_base
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import VisionModel

if TYPE_CHECKING:
    from multiring.vision.models.residual import PictureEncoder

VisionTask = ClassifyTask | DetectTask | SegmentTask


def describe(options: VisionOptions, data: LabelledParts) -> ModelDescription:
    """Return the description of the model that a training will make, without scores."""
    deviation = DEVIATIONS[options.architecture]
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    return ModelDescription(
        kind=options.kind,
        classes=data.classes,
        size=options.size,
        fit=options.fit,
        frames=options.frames if options.kind == "act" else 1,
        std=(deviation, deviation, deviation),
        architecture=options.architecture,
        arguments={name: given[name] for name in (*ENCODERS[options.architecture], *HEADS[options.kind])},
        has_nothing=data.has_nothing and options.kind in {"classify", "act"},
        symmetries=options.symmetries,
        digests={"labels": data.labels_digest, "split": data.split.digest}
        | ({"base": options.base_digest} if options.base else {}),
        base=Path(options.base).name,
        split=data.split.name,
        seed=options.seed,
    )


def build_task(
    options: VisionOptions, data: LabelledParts, described: ModelDescription, base: BaseWeights | None = None
) -> VisionTask:
    """Return the task of a training, with its data.

    Args:
        options: of the training.
        data: the samples.
        described: the model that the training makes.
        base: the pretrained weights of the model's encoder.

    Raises:
        ArgumentError: a batch has more samples than there are.
        DataError: the pretrained weights do not fit the network.
    """

    def made() -> VisionModel:
        model = VisionModel(described)
        if base is not None:
            load_base(model.network, base)
        if options.fit_head and (options.plain or not Checkpoints(Path(options.run), options.keep).is_there()):
            place = (0, 1) if options.plain else (mt.rank(), mt.size())
            decay = fit_head(model, head, device_of(options.device, plain=options.plain), place)
            mt.print_once(f"fitted the last layer to the pretrained features, weight decay {decay:g}")
        if options.sync_norm and not options.plain:
            model.network = mt.convert_sync_batchnorm(model.network)
        encoder = cast("PictureEncoder", model.network.encoder)
        if options.fixed_norms:
            fix_norms(encoder)
        fix_resolutions(encoder, options.fixed)
        return model

    task = task_of(described, data, made, options.smoothing)
    policy = AugmentationPolicy(mirror=options.mirror, turns=options.turns, crop=options.crop, colour=options.colour)
    training, cache = data.parts[options.train], options.cache_mib << 20
    if options.batch > len(training):
        raise ArgumentError(f"batch={options.batch}, but there are {len(training)} training samples: want at most that")
    plain = SampleOptions(
        size=options.size,
        fit=described.fit,
        seed=options.seed,
        cache_bytes=cache // 4,
        frames=described.frames,
    )
    drawn = dataclasses.replace(plain, batch=options.batch, policy=policy, cache_bytes=cache)
    task.training = PictureSamples(data.folder, training, task.targets, drawn)
    val = None
    if options.val:
        val = PictureSamples(data.folder, data.parts[options.val], task.targets, plain)
        task.evaluations = {options.val: val}
    head = HeadSamples(
        training=PictureSamples(data.folder, training, task.targets, dataclasses.replace(plain, cache_bytes=0)),
        val=val,
        symmetries=(4 if options.turns else 1) * (2 if options.mirror else 1),
        smoothing=options.smoothing,
    )
    what = "clips" if options.kind == "act" else "pictures"
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(data.left_out.items()))
    task.about = (
        f"{len(training)} training {what} of {data.folder.resolve().name}, split {data.split.name!r}"
        + (f"; left out: {left}" if left else "")
        + "."
    )
    return task


def task_of(described: ModelDescription, data: LabelledParts, made: Any, smoothing: float = 0.0) -> VisionTask:
    """Return the task of a kind of model, without its data.

    Args:
        described: the model's description.
        data: all samples.
        made: returns a new model.
        smoothing: the share of a label that is spread over all classes; for the kinds "classify" and "act".
    """
    if described.kind == "detect":
        most = max(len(each.labels) for samples in data.parts.values() for each in samples)
        return DetectTask(made, described.classes, size=described.size, fit=described.fit, most=most)
    if described.kind == "segment":
        return SegmentTask(made, described.classes, size=described.size, fit=described.fit)
    return ClassifyTask(made, (*described.classes, *[NOTHING] * described.has_nothing), smoothing)
