"""Measures a model, and distinguishes a broken one from a weak one: `kdjax evaluate`."""
