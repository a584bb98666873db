"""Large-batch optimizers LARS, LARC, LAMB and Muon. `multiring.torch` also has them."""

from multiring.torch.optim.lamb import LAMB as LAMB
from multiring.torch.optim.larc import LARC as LARC
from multiring.torch.optim.lars import LARS as LARS
from multiring.torch.optim.muon import Muon as Muon
from multiring.torch.optim.muon import NewtonSchulz as NewtonSchulz

__all__ = ["LAMB", "LARC", "LARS", "Muon", "NewtonSchulz"]
