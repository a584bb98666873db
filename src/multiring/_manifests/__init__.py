"""Manifests of jobs on Kubernetes, for `multiring manifest`."""

from multiring._manifests.pod_job import PodJob, PodResources
from multiring._manifests.systems import SYSTEMS
from multiring._manifests.yaml_text import yaml_of

__all__ = ["SYSTEMS", "PodJob", "PodResources", "yaml_of"]
