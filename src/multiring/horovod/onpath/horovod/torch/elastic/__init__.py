"""Training that continues from the last commit after a failure."""

from multiring._frontend.elastic.state import run_fn
from multiring.torch import init, shutdown
from multiring.torch.elastic import ElasticSampler, TorchState, run
