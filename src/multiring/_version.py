"""The version. The build reads the version from this file, and ranks compare their versions when they connect."""

VERSION = "0.2.0"
