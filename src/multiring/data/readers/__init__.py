"""What stores data sets, and how a record is read from it: one file a format."""
