"""Hosts pass blocks to each other, so that each block is read from the source only once."""
