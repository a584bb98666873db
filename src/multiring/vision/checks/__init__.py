"""Checks of a project: what is wrong with its pictures and labels, and which pictures belong together."""
