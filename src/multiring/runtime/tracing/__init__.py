"""Timelines: what ranks record, and on which clocks."""
