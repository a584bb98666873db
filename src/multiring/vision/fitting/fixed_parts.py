"""Parts of a pretrained encoder that a training does not change.

A detector or a segmentation trains few pictures at a time, and large ones, so statistics of a batch are noisy, and the
pretrained ones are better. Weights of the highest resolutions find edges and textures, which are the same for all
pictures; not training them saves a quarter of the time.
"""

from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from multiring.errors import ArgumentError
from multiring.vision.models.residual import PictureEncoder


class FixedBatchNorm(nn.BatchNorm2d):
    """A batch norm that normalises by its running statistics in training, too, and keeps them.

    Its tensors have the names of `torch.nn.BatchNorm2d`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x, (n, channels, h, w), normalised."""
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def fix_norms(module: nn.Module) -> None:
    """Replace each batch norm inside a module by one that keeps its statistics; the tensors stay the same ones."""
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            made = FixedBatchNorm(child.num_features, child.eps)
            made.weight, made.bias = child.weight, child.bias
            made.running_mean, made.running_var = child.running_mean, child.running_var
            made.num_batches_tracked = child.num_batches_tracked
            setattr(module, name, made)
        else:
            fix_norms(child)


def fix_resolutions(encoder: PictureEncoder, count: int) -> None:
    """Exclude the weights of the stem, and of the stages of an encoder's highest resolutions, from training.

    Raises:
        ArgumentError: the encoder has fewer resolutions.
    """
    if not count:
        return
    if count > len(encoder.last_stages):
        raise ArgumentError(
            f"fixed={count}: the network's encoder has {len(encoder.last_stages)} resolutions, so want 0 to that many"
        )
    for each in (encoder.stem, *encoder.stages[: 1 + encoder.last_stages[count - 1]]):
        each.requires_grad_(requires_grad=False)
