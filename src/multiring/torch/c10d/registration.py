"""Register the backend "multiring" at import, in case torch does not load entry points."""

from multiring_torch import register

register()
