"""The gated delta rule for a few positions a row, its states changed in place in a stack of layers.

flash-linear-attention's `fused_recurrent_gated_delta_rule`; letters are those of `models.delta`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kdjax.models.kernels.common import plgpu

_STEP_COLUMNS, _STEP_WARPS = 32, 4  # columns of a state for one program, and its warps


def fused_recurrent_gated_delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    kept: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    states: Float[Array, "L B H K V"],
    layer: Int[Array, ""],
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Computes `delta.recur` for the states of one layer of a stack, each read and written once.

    Returns outputs `[B, T, H, V]` and the stack. `kept` is the decay of a state. XLA
    reads and writes a layer's states some five times.
    """
    batch, _, heads, width = v.shape
    columns = min(_STEP_COLUMNS, width)
    return pl.pallas_call(
        functools.partial(_fused_recurrent, v.shape[1], q.shape[2], columns),
        grid=(batch, heads, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, states)),
        input_output_aliases={6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=_STEP_WARPS, num_stages=1),
        interpret=interpret,
    )(layer.astype(jnp.int32)[None], q, k, v, kept, beta, states)


def _fused_recurrent(count, groups, columns, layer, q, k, v, kept, beta, states, out, stack):
    row, head = pl.program_id(0), pl.program_id(1)
    part = pl.program_id(2) * columns + jnp.arange(columns, dtype=jnp.int32)
    keys = jnp.arange(states.shape[3], dtype=jnp.int32)
    at = plgpu.load(layer.at[jnp.int32(0)]), row, head, keys[:, None], part[None]

    def step(t, s):
        query, key = (plgpu.load(x.at[row, t, head % groups, keys])[:, None] for x in (q, k))
        s = s * plgpu.load(kept.at[row, t, head])
        value = plgpu.load(v.at[row, t, head, part]).astype(jnp.float32)
        new = plgpu.load(beta.at[row, t, head]) * (value - jnp.sum(s * key, axis=0))
        s = s + key * new[None]
        plgpu.store(out.at[row, t, head, part], jnp.sum(s * query, axis=0).astype(out.dtype))
        return s

    plgpu.store(stack.at[at], jax.lax.fori_loop(0, count, step, plgpu.load(states.at[at])))


# Columns of a state for one program, and its warps; warps that compute a head's position.
_COLUMNS, _WARPS, _CONV_WARPS = 128, 8, 2


class PendingUpdates(NamedTuple):
    """Effects of up to S positions on the states of L layers, which do not hold them yet.

    A state is then e^g S + sum of e^g' k v_new^T, with g the decays since.
    """

    keys: Float[Array, "L B G S K"]
    values: Float[Array, "L B H S V"]  # v_new
    decays: Float[Array, "L B H S"]
    mixed: Float[Array, "L B S E"]  # inputs of the convolution


def allocate_updates(
    shapes: Sequence[jax.ShapeDtypeStruct], interpret: bool = False
) -> PendingUpdates:
    """Uninitialised arrays: `recur_with_pending_updates` reads only places that it wrote."""
    made = pl.pallas_call(
        _write_nothing,
        grid=(1,),
        out_shape=tuple(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )()
    return PendingUpdates(*made)


def _write_nothing(*_):
    pass


def recur_with_pending_updates(
    mixed: Float[Array, "B X"],
    kernel: Float[Array, "E W"],
    decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    alive: Bool[Array, " B"],
    inputs: Float[Array, "L B W1 E"],
    states: Float[Array, "L B H K V"],
    pending: PendingUpdates,
    layer: Int[Array, ""],
    place: Int[Array, ""],
    interpret: bool = False,
) -> tuple[Float[Array, "B H V"], Array, Array, PendingUpdates]:
    """Computes `delta.read_and_keep` for one position a row, of a layer of stacks, all in place.

    `place` is the number of positions since the states were written. States are read once; only
    the last of the S places writes them, with all pending updates, and the convolution's last
    inputs, since writing a state costs as much as reading it. Rows that are not `alive` are neither
    read nor written. Sums are float32 for any dtype of states. S is at least W.
    """
    (batch, heads), width = decay.shape, states.shape[4]
    groups, key_width = pending.keys.shape[2], pending.keys.shape[4]
    # Separate arrays: joining them would take a kernel for each layer.
    at = *(x.astype(jnp.int32)[None] for x in (layer, place)), alive.astype(jnp.int32)

    def run(body: Any, grid: Any, made: Any, given: Any, kept: Any, warps: int) -> Any:
        """Outputs are new arrays first, then the arrays changed in place."""
        first = len(at) + len(given)
        return pl.pallas_call(
            functools.partial(_run_alive, body, len(grid)),
            grid=grid,
            out_shape=(*made, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept)),
            input_output_aliases={first + i: len(made) + i for i in range(len(kept))},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
        )(*at, *given, *kept)

    q = jax.ShapeDtypeStruct((batch, groups, key_width), jnp.float32)
    v = out = jax.ShapeDtypeStruct((batch, heads, width), mixed.dtype)
    kept = inputs, pending.keys, pending.mixed
    q, v, *kept = run(
        _causal_conv1d_update, (heads, batch), (q, v), (mixed, kernel), kept, _CONV_WARPS
    )
    inputs, *taken = kept
    grid = width // min(_COLUMNS, width), heads, batch
    given, kept = (q, v, decay, beta, taken[0]), (states, pending.values, pending.decays)
    out, states, *updated = run(_recur_with_pending, grid, (out,), given, kept, _WARPS)
    return out, inputs, states, PendingUpdates(*[taken[0], *updated, taken[1]])


def _run_alive(body: Any, axes: int, layer, place, alive, *refs):
    """Runs `body` for rows that are alive."""
    layer, place = (plgpu.load(x.at[jnp.int32(0)]) for x in (layer, place))
    numbers = [pl.program_id(i) for i in range(axes)]

    @pl.when(plgpu.load(alive.at[numbers[-1]]) > 0)
    def _():
        body(layer, place, *numbers, *refs)


def _causal_conv1d_update(layer, place, head, row, mixed, kernel, inputs, keys, taken, *outs):
    """`delta.convolve` and unit lengths of a head's query, key and value; keeps the inputs."""
    q, v, kept_inputs, kept_keys, kept_mixed = outs
    (_, _, groups, count, key_width), width, behind = keys.shape, v.shape[2], inputs.shape[2]
    group, ends = head % groups, place == count - 1
    of_key, of_value = (jnp.arange(n, dtype=jnp.int32) for n in (key_width, width))

    def convolve(column: Array) -> Array:
        total, some = jnp.zeros(column.shape, jnp.float32), column >= 0
        for back in range(behind, -1, -1):
            since = place - back
            if back:
                fresh = plgpu.load(
                    taken.at[layer, row, jnp.maximum(since, 0), column],
                    mask=some & (since >= 0),
                    other=0.0,
                )
                stale = plgpu.load(
                    inputs.at[layer, row, jnp.minimum(since, -1) + behind, column],
                    mask=some & (since < 0),
                    other=0.0,
                )
                x = fresh + stale
            else:
                x = plgpu.load(mixed.at[row, column])
                plgpu.store(kept_mixed.at[layer, row, place, column], x)
            weight = plgpu.load(kernel.at[column, jnp.int32(behind - back)])
            total += x.astype(jnp.float32) * weight.astype(jnp.float32)
            if back < behind:
                to = kept_inputs.at[layer, row, jnp.int32(behind - 1 - back), column]
                plgpu.store(to, x.astype(kept_inputs.dtype), mask=some & ends)
        return (total * jax.nn.sigmoid(total)).astype(mixed.dtype)

    def normalize(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-6)

    query = normalize(convolve(group * key_width + of_key)) * key_width**-0.5
    plgpu.store(q.at[row, group, of_key], query)
    key = normalize(convolve((groups + group) * key_width + of_key))
    plgpu.store(kept_keys.at[layer, row, group, place, of_key], key)
    value = convolve(2 * groups * key_width + head * width + of_value)
    plgpu.store(v.at[row, head, of_value], value)


def _recur_with_pending(layer, place, number, head, row, q, v, decay, beta, keys, *refs):
    """A part of a head's state: its output, and the position's update."""
    states, old_values, decays, out, kept_states, kept_values, kept_decays = refs
    _, _, groups, count, key_width = keys.shape
    columns = min(_COLUMNS, states.shape[4])
    part = number * columns + jnp.arange(columns, dtype=jnp.int32)
    of_key, past = (jnp.arange(n, dtype=jnp.int32) for n in (key_width, count))
    group, known = head % groups, past < place
    s = plgpu.load(states.at[layer, row, head, of_key[:, None], part[None]]).astype(jnp.float32)
    query = plgpu.load(q.at[row, group, of_key])
    key = plgpu.load(keys.at[layer, row, group, place, of_key])
    value = plgpu.load(v.at[row, head, part]).astype(jnp.float32)
    old_keys = plgpu.load(
        keys.at[layer, row, group, past[:, None], of_key[None]], mask=known[:, None], other=0.0
    )
    v_new = plgpu.load(
        old_values.at[layer, row, head, past[:, None], part[None]], mask=known[:, None], other=0.0
    )
    # Decay of the state, and of the update of each place before this one.
    now = plgpu.load(decay.at[row, head])
    faded = plgpu.load(decays.at[layer, row, head, past], mask=known, other=0.0)
    later = jnp.sum(jnp.where(past[:, None] < past[None], faded[None], 0.0), axis=1)
    share = jnp.where(known, jnp.exp(later + now), 0.0)
    whole = jnp.exp(jnp.sum(faded) + now)

    def recall(x: Array) -> Array:
        held = jnp.sum(s * x[:, None], axis=0)
        alike = share * jnp.sum(old_keys * x[None], axis=1)
        return whole * held + jnp.sum(alike[:, None] * v_new, axis=0)

    new = plgpu.load(beta.at[row, head]) * (value - recall(key))
    said = recall(query) + jnp.sum(key * query) * new
    plgpu.store(out.at[row, head, part], said.astype(out.dtype))
    plgpu.store(kept_values.at[layer, row, head, place, part], new)
    plgpu.store(kept_decays.at[layer, row, head, place], now)

    @pl.when(place == count - 1)
    def _():
        # A few keys at a time, loaded again from a cache: keeping the part in registers would leave
        # none for other programs, and many must wait for memory at once.
        size = min(16, key_width)

        def write(step, _):
            some = step * size + jnp.arange(size, dtype=jnp.int32)
            at = layer, row, head, some[:, None], part[None]
            one = plgpu.load(keys.at[layer, row, group, place, some])
            end = whole * plgpu.load(states.at[at]).astype(jnp.float32) + one[:, None] * new[None]
            for i in range(count - 1):
                one = plgpu.load(keys.at[layer, row, group, jnp.int32(i), some])
                two = plgpu.load(old_values.at[layer, row, head, jnp.int32(i), part])
                left = jnp.sum(jnp.where(past == i, share, 0.0))
                end += one[:, None] * (left * two)[None]
            plgpu.store(kept_states.at[at], end.astype(kept_states.dtype))

        jax.lax.fori_loop(0, key_width // size, write, None)
