"""The algorithms of collectives, one file for each, and the table that lists them."""

from multiring._collectives.table import TABLE as TABLE
from multiring._collectives.table import Builder as Builder
from multiring._collectives.table import algorithms_of as algorithms_of
from multiring._collectives.table import build as build
