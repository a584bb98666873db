"""The version, once: the build reads it from this file, ranks compare it when they meet."""

VERSION = "0.2.0"
