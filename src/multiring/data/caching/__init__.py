"""A host's disk between training and source: blocks that are verified whenever they are read."""
