"""Compression of tensors for transport."""

from multiring._frontend.compression_names import Compressor, NoneCompressor
from multiring.tensorflow.compression import Compression, FP16Compressor
