"""A classifier of clips: what changes in the features of each frame, then convolutions over time and place.

The mean of a clip's features over its frames is subtracted. It is mostly the background, which tells the training's
clips apart, so that a network learns them by heart and no motion. What does not change in a clip is left to the
classifiers of pictures.

The convolutions see three frames at a time, so the order of the frames counts. A mean of single frames would not know
it.
"""

from torch import Tensor, nn

from multiring.vision.models.residual import PictureEncoder

ENCODER_OUTPUTS = 3  # up to 1/16 of the resolution, where places still differ


def _over_time(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)
    )


class ClipClassifier(nn.Module):
    """A network that returns one logit for each class of a clip.

    Args:
        encoder: returns features of pictures; those of the lowest resolution are used. See ENCODER_OUTPUTS.
        outputs: the number of logits.
        width: channels of the convolutions over time.
    """

    def __init__(self, encoder: PictureEncoder, outputs: int, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.over_time = nn.Sequential(_over_time(encoder.channels[-1], width), _over_time(width, width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, outputs) for clips (n, frames, 3, h, w)."""
        frames = x.shape[1]
        features = self.encoder(x.flatten(0, 1))[-1]
        clips = features.unflatten(0, (-1, frames)).transpose(1, 2)
        changes = clips - clips.mean(2, keepdim=True)
        logits: Tensor = self.head(self.over_time(changes).mean((2, 3, 4)))
        return logits
