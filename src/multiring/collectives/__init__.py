"""The algorithms: one file each, and the table of them."""

from multiring.collectives.table import TABLE as TABLE
from multiring.collectives.table import Builder as Builder
from multiring.collectives.table import algorithms_of as algorithms_of
from multiring.collectives.table import build as build
