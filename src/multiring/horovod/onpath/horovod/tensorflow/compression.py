"""Compression of tensors for transport."""

from multiring.tensorflow.compression import Compression, Compressor, FP16Compressor, NoneCompressor
