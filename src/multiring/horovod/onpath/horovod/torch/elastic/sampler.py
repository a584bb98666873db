"""A sampler that yields only samples that no rank has processed in this epoch."""

from multiring.torch.elastic import ElasticSampler
