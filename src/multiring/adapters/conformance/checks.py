"""The list of checks that every adapter must pass, in the order in which the suite runs them.

The list was complete before the adapters of Chainer, Caffe and tinygrad were written.
"""

from collections.abc import Callable, Mapping

from multiring.adapters.conformance import members, training, values
from multiring.adapters.conformance.rank import Rank

CHECKS: Mapping[str, Callable[[Rank], None]] = {
    **{f"type {dtype}": values.check_type(dtype) for dtype in values.TYPES},
    "shapes": values.shapes,
    "zero size": values.zero_size,
    "non-contiguous": values.non_contiguous,
    "huge": values.huge,
    "NaN and infinities": values.infinities,
    "same bits": values.same_bits,
    "inputs intact": values.inputs_intact,
    "order": values.order,
    "order by names": members.named_order,
    "gradients": training.gradients,
    "unused parameter": training.unused_parameter,
    "replicas": training.replicas,
    "two models": training.two_models,
    "gradients through": training.gradient_through,
    "shapes differ": members.shapes_differ,
    "types differ": members.types_differ,
    "operations differ": members.operations_differ,
    "models differ": members.models_differ,
    "wrong operation": members.wrong_operation,
    "process set": members.process_set,
    "elastic state": training.state_is_kept,
    "going on": training.training_goes_on,
    "init again": members.init_again,
}
"""The checks that every rank calls, by name, in the order of `run`."""
