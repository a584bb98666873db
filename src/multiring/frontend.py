"""The former name of `multiring.adapters`."""

from multiring._former_names import refuse_module

refuse_module(__name__)
