"""Training that continues from the last commit after a failure."""

from multiring._frontend.elastic.state import run_fn as run_fn
from multiring.torch import init as init
from multiring.torch import shutdown as shutdown
from multiring.torch.elastic import ElasticSampler as ElasticSampler
from multiring.torch.elastic import TorchState as TorchState
from multiring.torch.elastic import run as run
