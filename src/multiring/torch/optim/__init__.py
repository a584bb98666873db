"""Large-batch optimizers LARS, LARC, LAMB and Muon. `multiring.torch` also has them."""

from multiring.torch.optim.lamb import LAMB
from multiring.torch.optim.larc import LARC
from multiring.torch.optim.lars import LARS
from multiring.torch.optim.muon import Muon, NewtonSchulz

__all__ = ["LAMB", "LARC", "LARS", "Muon", "NewtonSchulz"]
