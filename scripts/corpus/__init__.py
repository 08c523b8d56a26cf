"""Makes training text: which packages and files may be in it, and what is asked of them.

Pure functions of texts; `scripts/corpus/wheels.py` reads and writes. Nothing here imports JAX.
"""
