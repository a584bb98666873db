"""Compression of tensors for transport."""

from multiring.torch import Compression as Compression
from multiring.torch.compression import Compressor as Compressor
from multiring.torch.compression import FP16Compressor as FP16Compressor
from multiring.torch.compression import NoneCompressor as NoneCompressor
