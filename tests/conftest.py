"""Test session: 8 emulated CPU devices, strict ranks, full matmul precision."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import pytest
from absl import flags

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Grain asks absl for flags that pytest never parses.
flags.FLAGS.mark_as_parsed()


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)
