"""The topology of a job: which ranks share a host, what links cost, and how ranks are laid out on a grid."""

from multiring._topology.grid import coordinates_of as coordinates_of
from multiring._topology.grid import grid_of as grid_of
from multiring._topology.grid import hosts_by_rack as hosts_by_rack
from multiring._topology.grid import neighbours as neighbours
from multiring._topology.grid import strides_of as strides_of
from multiring._topology.model import SHM as SHM
from multiring._topology.model import TCP as TCP
from multiring._topology.model import Link as Link
from multiring._topology.model import OwnRails as OwnRails
from multiring._topology.model import Rack as Rack
from multiring._topology.model import Topology as Topology
from multiring._topology.text import text_of as text_of
from multiring._topology.text import topology_of as topology_of
