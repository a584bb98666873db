"""Compression of tensors for transport."""

from multiring.tensorflow.compression import Compression as Compression
from multiring.tensorflow.compression import Compressor as Compressor
from multiring.tensorflow.compression import FP16Compressor as FP16Compressor
from multiring.tensorflow.compression import NoneCompressor as NoneCompressor
