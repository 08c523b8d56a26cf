"""Distil a large quantized, frozen teacher into a small student, in JAX/Flax."""

from kdjax._version import __version__ as __version__
