"""Large-batch optimizers LARS, LARC, LAMB, Muon and Shampoo. `multiring.torch` also has them."""

from multiring.torch.optim.lamb import LAMB
from multiring.torch.optim.larc import LARC
from multiring.torch.optim.lars import LARS
from multiring.torch.optim.muon import Muon, NewtonSchulz
from multiring.torch.optim.shampoo import Eigendecomposition, Shampoo

__all__ = ["LAMB", "LARC", "LARS", "Eigendecomposition", "Muon", "NewtonSchulz", "Shampoo"]
