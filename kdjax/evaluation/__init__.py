"""What `python -m kdjax.evaluate` measures, and how it tells a broken model from a weak one."""
