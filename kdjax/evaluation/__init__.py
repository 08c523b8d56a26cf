"""Measures a model, and tells a broken one from a weak one: `kdjax evaluate`."""
