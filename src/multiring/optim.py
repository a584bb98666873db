"""The former name of `multiring.convergence`."""

from multiring._former_names import refuse_module

refuse_module(__name__)
