"""The rails of a rank: their choice, their speed, and the topology files that describe them."""
