"""Compression of tensors for transport."""

from multiring.torch import Compression
from multiring.torch.compression import Compressor, FP16Compressor, NoneCompressor
