"""States that can be restored to the last commit."""

from multiring.torch.elastic.state import ModelStateHandler as ModelStateHandler
from multiring.torch.elastic.state import OptimizerStateHandler as OptimizerStateHandler
from multiring.torch.elastic.state import SamplerStateHandler as SamplerStateHandler
from multiring.torch.elastic.state import StateHandler as StateHandler
from multiring.torch.elastic.state import TorchState as TorchState
from multiring.torch.elastic.state import get_handler_registry as get_handler_registry
from multiring.torch.elastic.state import set_handler_registry as set_handler_registry
