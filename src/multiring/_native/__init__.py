"""The compiled core, re-exported: everything outside this room imports it from here."""

from multiring._native._core import VERSION as VERSION
