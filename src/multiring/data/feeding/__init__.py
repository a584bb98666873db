"""Batches: made by workers before they are asked for, the same whoever makes them."""
