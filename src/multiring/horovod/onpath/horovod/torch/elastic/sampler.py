"""Samples that no rank has had yet."""

from multiring.torch.elastic import ElasticSampler as ElasticSampler
