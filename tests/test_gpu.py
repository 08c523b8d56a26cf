"""Tests that need a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_gpu.py`."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS, block_type, decode
from kdjax.models import decode_weights, decoding
from kdjax.models.attention import attend
from kdjax.models.decoder import Compute, functional
from kdjax.models.schema import spec_from_table

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def packed(rng, rows, length, most):
    """Segment ids of random cuts, with padding at the end of every other row."""
    ids = np.zeros((rows, length), np.int32)
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, length), rng.integers(0, most), replace=False))
        ids[row] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
        if row % 2:
            ids[row, length - 37 :] = 0
    return ids


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "local", "most"),
    [
        (14, 2, 64, 0, None, 8),
        (28, 4, 128, 0, None, 8),
        (4, 1, 256, 100, None, 8),
        (4, 1, 256, 100, True, 8),
        (4, 1, 256, 100, False, 8),
        (4, 1, 256, 100, True, 1),
    ],
)
def test_cudnn_attention_equals_the_reference(heads, kv_heads, width, window, local, most):
    """Both references are computed on the CPU, which compiles them sooner than a GPU."""
    rng = np.random.default_rng(0)
    rows, length = 2, 512
    segments = packed(rng, rows, length, most) if most > 1 else np.ones((rows, length), np.int32)
    real = segments != 0
    shapes = [(rows, length, h, width) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, cotangent = (rng.normal(0, 1, s).astype(jnp.bfloat16) for s in shapes)
    # An argument: as a constant of the programs it makes the test take twice as long.
    cotangent = np.where(real[..., None, None], cotangent, 0).astype(np.float32)

    def outputs(implementation, dtype, device):
        def f(q, k, v, cotangent):
            how = dict(implementation=implementation, max_segments=most, window=window)
            flag = None if local is None else jnp.asarray(local)
            out = attend(q, k, v, jnp.asarray(segments), flag, **how)
            return jnp.sum(out.astype(jnp.float32) * cotangent), out

        with jax.default_device(device):
            grads, out = jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(
                *(x.astype(dtype) for x in (q, k, v)), cotangent
            )
        return [np.asarray(x, np.float32) for x in (out, *grads)]

    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    got = outputs("cudnn", jnp.bfloat16, gpu)
    want, half = (outputs("xla", dtype, cpu) for dtype in (jnp.float32, jnp.bfloat16))
    for name, exact, fused, plain in zip(("out", "dq", "dk", "dv"), want, got, half, strict=True):
        assert np.all(np.isfinite(fused)), name
        scale = np.linalg.norm(exact[real])
        error = np.linalg.norm((fused - exact)[real]) / scale
        reference = np.linalg.norm((plain - exact)[real]) / scale
        print(f"{name}: cudnn {error:.2e}, xla bf16 {reference:.2e}")
        assert error < 2 * reference + 2e-3, name


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_blocks_decode_as_on_the_cpu(name):
    """Up to one unit in the last place: the GPU may contract d * q - m into one rounding.

    Of subnormal numbers, which MXFP4 reaches, the CPU makes 0.
    """
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (64, 8 * block_type(name).nbytes), dtype=np.uint8)
    here = np.asarray(jax.jit(lambda x: decode(x, name))(raw))
    with jax.default_device(jax.devices("cpu")[0]):
        there = np.asarray(jax.jit(lambda x: decode(x, name))(raw))
    same = (here == there) | (np.isnan(here) & np.isnan(there))
    close = np.isclose(here, there, rtol=2e-7, atol=float(np.finfo(np.float32).tiny))
    print(f"{name}: {np.mean(same):.6f} equal bits")
    assert np.all(same | close)


def test_decoding_copies_no_cache():
    """Neither with the kernel, which writes it in place, nor with the lines that define it."""
    spec = spec_from_table(open_table(Path(__file__).parent / "goldens" / "qwen2_tied"))
    placement = Placement.on(make_mesh(-1, 1, 1, jax.devices()[:1]))
    for kernel in (placement, None):
        compute = Compute(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, placement=kernel)
        functions, params = functional(spec, compute)
        writer = decoding.StepWriter(functions, spec.vocab_size)
        # Nothing is allocated.
        prepare = functools.partial(
            decode_weights._prepare, functions=functions, spread=None, apart=True
        )
        prepared = jax.eval_shape(prepare, params)
        make = functools.partial(decoding._open, writer=writer, slots=8, capacity=4096)
        slots = jax.eval_shape(make, params)
        static = dict(writer=writer, sampling=decoding.Sampling(16))
        of = jax.ShapeDtypeStruct
        rest = prepared, slots, of((), jnp.uint32), of((8,), bool)
        lowered = decoding._advance_on_gpu.lower(params, *rest, **static)
        used = lowered.compile().memory_analysis()
        assert used is not None
        assert used.temp_size_in_bytes < 2 * slots.cache.k.size  # bytes of one half
