"""The algorithms of collectives, one file for each, and the table that lists them."""

from multiring._collectives.table import TABLE, Builder, algorithms_of, build
