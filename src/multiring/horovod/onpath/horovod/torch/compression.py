"""Compression of tensors for transport."""

from multiring._frontend.compression_names import Compressor, NoneCompressor
from multiring.torch import Compression
from multiring.torch.compression import FP16Compressor
