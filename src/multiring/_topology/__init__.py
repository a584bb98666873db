"""The topology of a job: which ranks share a host, what links cost, and how ranks are laid out on a grid."""

from multiring._topology.devices import (
    LINK_NAMES,
    DeviceCosts,
    DeviceIsland,
    DeviceLink,
    HostDevices,
    islands_of,
)
from multiring._topology.grid import coordinates_of, grid_of, hosts_by_rack, neighbours, strides_of
from multiring._topology.model import SHM, TCP, Link, OwnRails, Rack, Topology
from multiring._topology.text import text_of, topology_of, topology_of_table
