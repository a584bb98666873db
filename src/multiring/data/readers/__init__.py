"""The storages of data sets, and a reader for each format."""
