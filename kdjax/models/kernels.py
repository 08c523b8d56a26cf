"""Triton kernels through Pallas for what XLA does in too many passes over memory.

Each kernel computes what a few lines of JAX define where it is called. Those lines run wherever
`Placement.kernels` is false: on other devices, where `tensor` splits what a kernel would have
whole, and once JAX has no Triton any more, deprecated since 0.11. `normalize_rows` has gradients
here, and `models.chunks` has: the others serve a frozen teacher and what brings its own.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu: Any = None

# In place of -inf for ids that do not exist and keys that a query does not see: exp of it is 0, and
# 0 * (a - a) is not NaN.
EXCLUDED = -1e30
FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of fraction; largest 448, no infinity
FP8_MAX = 448.0
# Columns at a time, and warps of 32 threads that share them: the fastest on an H200.
_WIDTH_BLOCK, _WIDTH_WARPS = 2048, 8
_NORM_ROWS = 16  # rows whose gradients of a norm's weight one program adds up


def _logits_block(rows: int) -> tuple[int, int]:
    return (512, 1) if rows >= 4096 else (2048, 2)  # many rows fill the chip with small programs


def fp8_scales(most: Array) -> tuple[Array, Array]:
    """Factor that fits numbers of at most `most` into float8, and its inverse."""
    most = jnp.maximum(most, 1e-30)  # of zeros as well: 448 / 1e-30 is still finite
    return FP8_MAX / most, most / FP8_MAX


class SoftmaxSums(NamedTuple):
    """Sums of each row of two models' logits, `[*B 1]` float32; a missing teacher's are None.

    Exponents start from the peaks: x = student - peak, y = (teacher - teacher_peak) / T.
    """

    peak: Array  # the student's largest logit
    hard: Array  # sum of e^x
    soft: Array  # sum of e^(x / T)
    teacher_peak: Array | None = None
    teacher_soft: Array | None = None  # sum of e^y
    distance: Array | None = None  # sum of e^y (y - x / T)


def softmax_sums(
    student: Float[Array, "*B V"],
    teacher: Float[Array, "*B V"] | None,
    temperature: float,
    real: int,
    *,
    interpret: bool = False,
) -> SoftmaxSums:
    """Computes `losses.divergences.softmax_sums` in one reading of each logit; float32 logits."""
    rows = [x.reshape(-1, x.shape[-1]) for x in (student, teacher) if x is not None]
    count = rows[0].shape[0]
    width, warps = _logits_block(count)
    kernel = functools.partial(_softmax_sums, len(rows), temperature, real, width)
    sums = pl.pallas_call(
        kernel,
        grid=(count,),
        out_shape=[jax.ShapeDtypeStruct((count,), jnp.float32)] * (3 * len(rows)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
    )(*rows)
    return SoftmaxSums(*(x.reshape(*student.shape[:-1], 1) for x in sums))


def _softmax_sums(inputs: int, temperature: float, real: int, width: int, *refs):
    row = pl.program_id(0)
    cooled = 1 / temperature

    def block(index, carry, whole=True):
        column = index * width + jnp.arange(width, dtype=jnp.int32)
        # Without a mask four logits are loaded at once.
        inside: dict[str, Any] = {} if whole else dict(mask=column < real, other=EXCLUDED)
        x, *teacher = (plgpu.load(ref.at[row, column], **inside) for ref in refs[:inputs])
        (peak, hard, soft), theirs = carry[:3], carry[3:]
        new = jnp.maximum(peak, jnp.max(x))
        below, fall = x - new, peak - new
        hard = hard * jnp.exp(fall) + jnp.sum(jnp.exp(below))
        if temperature != 1:
            below, fall = below * cooled, fall * cooled
            soft = soft * jnp.exp(fall) + jnp.sum(jnp.exp(below))
        else:
            soft = hard
        if not teacher:
            return new, hard, soft
        (y,), (their_peak, z, distance) = teacher, theirs
        their_new = jnp.maximum(their_peak, jnp.max(y))
        their_below = (y - their_new) * cooled
        their_fall = (their_peak - their_new) * cooled
        weight, kept = jnp.exp(their_below), jnp.exp(their_fall)
        # The sums so far hold exponents below the old peaks. The new peaks are higher: scale
        # each sum by e^fall, and shift the differences that `distance` weighs.
        distance = kept * (distance + z * (their_fall - fall))
        distance += jnp.sum(weight * (their_below - below))
        return new, hard, soft, their_new, z * kept + jnp.sum(weight), distance

    lowest, zero = jnp.float32(EXCLUDED), jnp.float32(0)
    blocks, left = divmod(real, width)
    sums = jax.lax.fori_loop(0, blocks, block, (lowest, zero, zero) * inputs)
    if left:
        sums = block(blocks, sums, whole=False)
    for ref, value in zip(refs[inputs:], sums, strict=True):
        plgpu.store(ref.at[row], value)


def gate_and_round(
    gate: Float[Array, "N F"],
    up: Float[Array, "N F"],
    rows: Float[Array, " N"],
    gate_scale: Float[Array, " F"],
    up_scale: Float[Array, " F"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N F"], Float[Array, " N"]]:
    """silu(gate) * up of products not yet scaled, as float8 and a float32 scale a row.

    A number of `gate` stands for gate * rows * gate_scale, one of `up` likewise. Read once: XLA
    writes the result in bf16, reads it for each row's largest number, and again to round it.
    """
    count, width = gate.shape
    return pl.pallas_call(
        functools.partial(_gate_and_round, width),
        grid=(count,),
        out_shape=(
            jax.ShapeDtypeStruct((count, width), FP8),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=_WIDTH_WARPS, num_stages=1),
        interpret=interpret,
    )(gate, up, rows, gate_scale, up_scale)


def _gate_and_round(width: int, gate, up, rows, gate_scale, up_scale, values, scale):
    row = pl.program_id(0)
    of_row, kept = plgpu.load(rows.at[row]), []
    for start, size in _blocks(width):
        column = start + jnp.arange(size, dtype=jnp.int32)
        inside = column < width
        refs = gate.at[row, column], up.at[row, column], gate_scale.at[column], up_scale.at[column]
        g, u, of_gate, of_up = (
            plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32) for ref in refs
        )
        g *= of_row * of_gate
        kept.append((column, inside, g * jax.nn.sigmoid(g) * (u * (of_row * of_up))))
    # Maxima after all loads: warps meet for each maximum, and later loads would wait for that.
    largest: dict[int, Any] = {}
    for _, _, x in kept:
        largest[x.size] = jnp.maximum(largest.get(x.size, 0.0), jnp.abs(x))
    most = functools.reduce(jnp.maximum, map(jnp.max, largest.values()))
    to, inverse = fp8_scales(most)
    for column, inside, x in kept:
        plgpu.store(values.at[row, column], (x * to).astype(FP8), mask=inside)
    plgpu.store(scale.at[row], inverse)


def round_rows(
    x: Float[Array, "N D"],
    norm: tuple[Float[Array, " D"], float] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, " N"]]:
    """x as float8 and a float32 scale a row; with a norm's (weight, eps), of x normalized by it."""
    scales = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    return _run_norm(x, norm, (jax.ShapeDtypeStruct(x.shape, FP8), scales), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normalize_rows(
    x: Float[Array, "N D"], weight: Float[Array, " D"], eps: float, interpret: bool = False
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """x, and x / rms(x) * weight, as `decoder.RMSNorm` defines it.

    The two are returned together for the backward pass: one kernel adds the gradient that reaches x
    along the residual stream to the one that it computes through the norm. XLA takes three kernels
    forwards and four backwards.
    """
    return x, _run_norm(x, (weight, eps), jax.ShapeDtypeStruct(x.shape, x.dtype), interpret)


def _run_norm(x: Array, norm: tuple[Array, float] | None, out: Any, interpret: bool) -> Any:
    *weight, eps = norm or (None,)
    return pl.pallas_call(
        functools.partial(_norm, x.shape[1], eps),
        grid=(x.shape[0],),
        out_shape=out,
        compiler_params=_norm_parameters(x.shape[1]),
        interpret=interpret,
    )(x, *weight)


def _norm(width: int, eps: float | None, x, *refs):
    """One row's norm; refs: the weight unless eps is None, the result, a scale if float8."""
    row, (column, inside) = pl.program_id(0), _columns(width)
    y = plgpu.load(x.at[row, column], mask=inside, other=0.0)
    if eps is not None:
        weight, *refs = refs
        w = plgpu.load(weight.at[column], mask=inside, other=0.0)
        v = y.astype(jnp.float32)
        y = ((v * jax.lax.rsqrt(jnp.sum(v * v) / width + eps)).astype(w.dtype) * w).astype(y.dtype)
    if len(refs) == 2:
        v = y.astype(jnp.float32)
        to, inverse = fp8_scales(jnp.max(jnp.abs(v)))
        plgpu.store(refs[1].at[row], inverse)
        y = (v * to).astype(FP8)
    plgpu.store(refs[0].at[row, column], y, mask=inside)


def _columns(width: int) -> tuple[Array, Array]:
    """Column numbers up to a power of two, which Triton asks for, and which of them exist."""
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    return column, column < width


def _norm_parameters(width: int) -> Any:
    # 4 warps for widths of 896 and 3584; beyond, what keeps a thread's share the same.
    warps = min(max(4, pl.next_power_of_2(width) // 1024), 16)
    return plgpu.CompilerParams(num_warps=warps, num_stages=1)


def _normalize_forward(x: Array, weight: Array, eps: float, interpret: bool) -> Any:
    return normalize_rows(x, weight, eps, interpret), (x, weight)


def _normalize_backward(eps: float, interpret: bool, residuals: Any, gradients: Any) -> Any:
    (x, weight), (along, through) = residuals, gradients
    count, width = x.shape
    programs = pl.cdiv(count, _NORM_ROWS)
    dx, dw = pl.pallas_call(
        functools.partial(_norm_backward, count, width, eps),
        grid=(programs,),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, width), jnp.float32),
        ),
        compiler_params=_norm_parameters(x.shape[1]),
        interpret=interpret,
    )(x, weight, along, through)
    return dx, jnp.sum(dw, axis=0).astype(weight.dtype)


def _norm_backward(count: int, width: int, eps: float, x, weight, along, through, dx, dw):
    program, (column, inside) = pl.program_id(0), _columns(width)
    w = plgpu.load(weight.at[column], mask=inside, other=0.0).astype(jnp.float32)

    def one(step, total):
        row = program * _NORM_ROWS + step
        here = inside & (row < count)
        v, add, dy = (
            plgpu.load(ref.at[row, column], mask=here, other=0.0).astype(jnp.float32)
            for ref in (x, along, through)
        )
        g = dy * w
        squares, shared = jnp.sum(v * v) / width, jnp.sum(g * v) / width
        scale = jax.lax.rsqrt(squares + eps)
        hat = v * scale
        grad = add + scale * (g - hat * (scale * shared))
        plgpu.store(dx.at[row, column], grad.astype(dx.dtype), mask=here)
        return total + dy * hat

    total = jax.lax.fori_loop(0, _NORM_ROWS, one, jnp.zeros(column.shape, jnp.float32))
    plgpu.store(dw.at[program, column], total, mask=inside)


normalize_rows.defvjp(_normalize_forward, _normalize_backward)


class BlockSums(NamedTuple):
    """Sums of each block of a row's logits, `[B, N]` float32; exponents start from its peak."""

    peaks: Array
    hard: Array  # sum of e^x
    soft: Array  # sum of e^(x / T) of what is kept


def sum_blocks(
    logits: Float[Array, "B V"],
    least: Float[Array, "B 1"] | None,
    blocks: int,
    temperature: float,
    real: int,
    *,
    interpret: bool = False,
) -> BlockSums:
    """Computes `decoding.sum_blocks` in one reading of each logit; float32 logits."""
    count, width = logits.shape[0], -(-logits.shape[1] // blocks)
    return BlockSums(
        *pl.pallas_call(
            functools.partial(_sum_blocks, width, temperature, real),
            grid=(count, blocks),
            out_shape=[jax.ShapeDtypeStruct((count, blocks), jnp.float32)] * 3,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
        )(logits, *([] if least is None else [least[:, 0]]))
    )


def _sum_blocks(width: int, temperature: float, real: int, logits, *refs):
    least, (peaks, hard, soft) = refs[:-3], refs[-3:]
    row, block = pl.program_id(0), pl.program_id(1)
    column, inside = _columns(width)
    column += block * width
    inside &= column < real
    x = plgpu.load(logits.at[row, column], mask=inside, other=EXCLUDED)
    peak = jnp.max(x)
    below = x - peak
    weights = jnp.where(inside, jnp.exp(below), 0.0)
    plgpu.store(peaks.at[row, block], peak)
    plgpu.store(hard.at[row, block], jnp.sum(weights))
    if temperature != 1:
        weights = jnp.where(inside, jnp.exp(below / temperature), 0.0)
    if least:
        weights = jnp.where(x >= plgpu.load(least[0].at[row]), weights, 0.0)
    plgpu.store(soft.at[row, block], jnp.sum(weights))


# Of `attend_and_keep`: slots of the cache at a time, warps, stages.
_SLOTS, _DECODING_WARPS, _DECODING_STAGES = 64, 4, 3


def attend_and_keep(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T D"],
    keys: Float[Array, "L B K S D"],
    values: Float[Array, "L B K S D"],
    layer: Int[Array, ""],
    positions: Int[Array, " B"],
    seen: Int[Array, ""],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Computes `attention.attend_and_keep` for T new positions a row; in one reading, and in place.

    The R = T G queries of a key head are those of the first position, then those of the next. A row
    reads of the cache what its position says and at most `seen` positions, its own included: XLA
    copies a layer to multiply it, and reads all.
    """
    batch, heads, rows = q.shape[:3]
    new, slots = k.shape[2], keys.shape[3]
    at = jnp.stack([layer, seen]).astype(jnp.int32), positions.astype(jnp.int32)
    # A block that reaches beyond the cache is masked; none does where blocks divide it.
    size = min(_SLOTS, pl.next_power_of_2(slots))
    return pl.pallas_call(
        functools.partial(_attend_and_keep, rows, new, slots, size, scale),
        grid=(batch, heads),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values)),
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plgpu.CompilerParams(
            num_warps=_DECODING_WARPS, num_stages=_DECODING_STAGES
        ),
        interpret=interpret,
    )(*at, q, k, v, keys, values)


def _attend_and_keep(
    rows: int, new: int, slots: int, size: int, scale: float, layer, positions, q, k, v, *refs
):
    keys, values, out, kept_keys, kept_values = refs
    row, head = pl.program_id(0), pl.program_id(1)
    at, seen = (plgpu.load(layer.at[jnp.int32(i)]) for i in range(2))
    position = plgpu.load(positions.at[row])
    # Triton multiplies at least 16 by 16.
    of_query = jnp.arange(max(16, pl.next_power_of_2(rows)), dtype=jnp.int32)
    of_new = jnp.arange(max(16, pl.next_power_of_2(new)), dtype=jnp.int32)
    width = jnp.arange(q.shape[3], dtype=jnp.int32)[None]
    queries = plgpu.load(
        q.at[row, head, of_query[:, None], width], mask=of_query[:, None] < rows, other=0.0
    )
    inside = of_new[:, None] < new
    fresh = [
        plgpu.load(x.at[row, head, of_new[:, None], width], mask=inside, other=0.0) for x in (k, v)
    ]
    asks = position + of_query // (rows // new)  # each query's own position

    def weigh(key: Array, slot: Array, known: Array) -> Array:
        scores = plgpu.dot(queries, key, trans_b=True) * scale
        behind = asks[:, None] - slot[None]
        return jnp.where(known[None] & (behind >= 0) & (behind < seen), scores, EXCLUDED)

    def block(index, carry):
        peak, total, mixed = carry
        slot = index * size + jnp.arange(size, dtype=jnp.int32)
        masked = {} if slots % size == 0 else dict(mask=slot[:, None] < slots, other=0.0)
        key, value = (
            plgpu.load(x.at[at, row, head, slot[:, None], width], **masked) for x in (keys, values)
        )
        scores = weigh(key, slot, slot < position)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        fall, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[:, None])
        total = total * fall + jnp.sum(weights, axis=1)
        mixed = mixed * fall[:, None] + plgpu.dot(weights.astype(value.dtype), value)
        return higher, total, mixed

    # The new positions first: a query sees itself at least, so that no peak is EXCLUDED.
    scores = weigh(fresh[0], position + of_new, of_new < new)
    peak = jnp.max(scores, axis=1)
    weights = jnp.exp(scores - peak[:, None])
    carry = peak, jnp.sum(weights, axis=1), plgpu.dot(weights.astype(fresh[1].dtype), fresh[1])
    first = jnp.maximum(position - seen + 1, 0) // size
    _, total, mixed = jax.lax.fori_loop(first, pl.cdiv(position, size), block, carry)
    result = (mixed / total[:, None]).astype(out.dtype)
    plgpu.store(out.at[row, head, of_query[:, None], width], result, mask=of_query[:, None] < rows)
    kept = inside & (position + of_new[:, None] < slots)
    for ref, x in zip((kept_keys, kept_values), fresh, strict=True):
        plgpu.store(ref.at[at, row, head, position + of_new[:, None], width], x, mask=kept)


def states_fit(keys: int, values: int, dtype: DTypeLike) -> bool:
    """Whether kernels take states of this shape: half precision, powers of two.

    Of 256 by 256 the chunks before and behind take 295 kB of the 232 that a processor has.
    """
    sizes = all(16 <= n <= 128 and n & (n - 1) == 0 for n in (keys, values))
    return sizes and jnp.dtype(dtype).itemsize == 2


_STEP_COLUMNS, _STEP_WARPS = 32, 4  # of a state that few positions read, as `_STATE_COLUMNS`


def recur_in_place(
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

    Returns outputs `[B, T, H, V]` and the stack. `kept` is the part of a state that stays. XLA
    reads and writes a layer's states some five times.
    """
    batch, _, heads, width = v.shape
    columns = min(_STEP_COLUMNS, width)
    return pl.pallas_call(
        functools.partial(_recur_in_place, v.shape[1], q.shape[2], columns),
        grid=(batch, heads, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, states)),
        input_output_aliases={6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=_STEP_WARPS, num_stages=1),
        interpret=interpret,
    )(layer.astype(jnp.int32)[None], q, k, v, kept, beta, states)


def _recur_in_place(count, groups, columns, layer, q, k, v, kept, beta, states, out, stack):
    row, head = pl.program_id(0), pl.program_id(1)
    part = pl.program_id(2) * columns + jnp.arange(columns, dtype=jnp.int32)
    keys = jnp.arange(states.shape[3], dtype=jnp.int32)
    at = plgpu.load(layer.at[jnp.int32(0)]), row, head, keys[:, None], part[None]

    def turn(t, s):
        query, key = (plgpu.load(x.at[row, t, head % groups, keys])[:, None] for x in (q, k))
        s = s * plgpu.load(kept.at[row, t, head])
        value = plgpu.load(v.at[row, t, head, part]).astype(jnp.float32)
        new = plgpu.load(beta.at[row, t, head]) * (value - jnp.sum(s * key, axis=0))
        s = s + key * new[None]
        plgpu.store(out.at[row, t, head, part], jnp.sum(s * query, axis=0).astype(out.dtype))
        return s

    plgpu.store(stack.at[at], jax.lax.fori_loop(0, count, turn, plgpu.load(states.at[at])))


class News(NamedTuple):
    """Effects of up to S positions on the states of L layers, which do not hold them yet.

    A state is then e^g S + sum of e^g' k news^T, g what it has faded since.
    """

    keys: Float[Array, "L B G S K"]
    news: Float[Array, "L B H S V"]
    decays: Float[Array, "L B H S"]
    mixed: Float[Array, "L B S E"]  # inputs of the convolution


def hold_news(shapes: Sequence[jax.ShapeDtypeStruct], interpret: bool = False) -> News:
    """Arrays of these shapes that nobody wrote: `read_with_news` reads what it wrote alone."""
    made = pl.pallas_call(
        _write_nothing,
        grid=(1,),
        out_shape=tuple(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )()
    return News(*made)


def _write_nothing(*_):
    pass


# Columns of a state that one program reads, its warps; warps that make a head's position.
_NEWS_COLUMNS, _NEWS_WARPS, _MIXED_WARPS = 128, 8, 2


def read_with_news(
    mixed: Float[Array, "B X"],
    kernel: Float[Array, "E W"],
    decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    alive: Bool[Array, " B"],
    inputs: Float[Array, "L B W1 E"],
    states: Float[Array, "L B H K V"],
    news: News,
    layer: Int[Array, ""],
    place: Int[Array, ""],
    interpret: bool = False,
) -> tuple[Float[Array, "B H V"], Array, Array, News]:
    """Computes `delta.read_and_keep` for one position a row, of a layer of stacks, all in place.

    It is the position number `place` since the states were written. States are read once; only the
    last of the S places writes them, and the convolution's last inputs, with what all taught: a
    state is as much again to write as to read. Of rows that are not `alive` nothing is read,
    kept or given. Sums are float32, whatever the states are. S is at least W.
    """
    (batch, heads), width = decay.shape, states.shape[4]
    groups, key_width = news.keys.shape[2], news.keys.shape[4]
    # Apart: joined for each layer they would take a kernel.
    at = *(x.astype(jnp.int32)[None] for x in (layer, place)), alive.astype(jnp.int32)

    def run(body: Any, grid: Any, made: Any, given: Any, kept: Any, warps: int) -> Any:
        """Outputs are those that are made, then what is kept, changed in place."""
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
    kept = inputs, news.keys, news.mixed
    q, v, *kept = run(_take_position, (heads, batch), (q, v), (mixed, kernel), kept, _MIXED_WARPS)
    inputs, *taken = kept
    grid = width // min(_NEWS_COLUMNS, width), heads, batch
    given, kept = (q, v, decay, beta, taken[0]), (states, news.news, news.decays)
    out, states, *taught = run(_read_with_news, grid, (out,), given, kept, _NEWS_WARPS)
    return out, inputs, states, News(*[taken[0], *taught, taken[1]])


def _run_alive(body: Any, axes: int, layer, place, alive, *refs):
    """Runs `body` for rows that are alive."""
    layer, place = (plgpu.load(x.at[jnp.int32(0)]) for x in (layer, place))
    numbers = [pl.program_id(i) for i in range(axes)]

    @pl.when(plgpu.load(alive.at[numbers[-1]]) > 0)
    def _():
        body(layer, place, *numbers, *refs)


def _take_position(layer, place, head, row, mixed, kernel, inputs, keys, taken, *outs):
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


def _read_with_news(layer, place, number, head, row, q, v, decay, beta, keys, *refs):
    """A part of a head's state: what it says, and what the position teaches."""
    states, old_news, decays, out, kept_states, kept_news, kept_decays = refs
    _, _, groups, count, key_width = keys.shape
    columns = min(_NEWS_COLUMNS, states.shape[4])
    part = number * columns + jnp.arange(columns, dtype=jnp.int32)
    of_key, past = (jnp.arange(n, dtype=jnp.int32) for n in (key_width, count))
    group, known = head % groups, past < place
    s = plgpu.load(states.at[layer, row, head, of_key[:, None], part[None]]).astype(jnp.float32)
    query = plgpu.load(q.at[row, group, of_key])
    key = plgpu.load(keys.at[layer, row, group, place, of_key])
    value = plgpu.load(v.at[row, head, part]).astype(jnp.float32)
    taught = plgpu.load(
        keys.at[layer, row, group, past[:, None], of_key[None]], mask=known[:, None], other=0.0
    )
    news = plgpu.load(
        old_news.at[layer, row, head, past[:, None], part[None]], mask=known[:, None], other=0.0
    )
    # What is left of the state, and of what each place before this one taught.
    now = plgpu.load(decay.at[row, head])
    faded = plgpu.load(decays.at[layer, row, head, past], mask=known, other=0.0)
    later = jnp.sum(jnp.where(past[:, None] < past[None], faded[None], 0.0), axis=1)
    share = jnp.where(known, jnp.exp(later + now), 0.0)
    whole = jnp.exp(jnp.sum(faded) + now)

    def recall(x: Array) -> Array:
        held = jnp.sum(s * x[:, None], axis=0)
        alike = share * jnp.sum(taught * x[None], axis=1)
        return whole * held + jnp.sum(alike[:, None] * news, axis=0)

    new = plgpu.load(beta.at[row, head]) * (value - recall(key))
    said = recall(query) + jnp.sum(key * query) * new
    plgpu.store(out.at[row, head, part], said.astype(out.dtype))
    plgpu.store(kept_news.at[layer, row, head, place, part], new)
    plgpu.store(kept_decays.at[layer, row, head, place], now)

    @pl.when(place == count - 1)
    def _():
        # A few keys at a time, loaded again, from a cache: a whole part in registers to the end
        # leaves none for other programs, of which many are to wait for memory at once.
        size = min(16, key_width)

        def write(turn, _):
            some = turn * size + jnp.arange(size, dtype=jnp.int32)
            at = layer, row, head, some[:, None], part[None]
            one = plgpu.load(keys.at[layer, row, group, place, some])
            end = whole * plgpu.load(states.at[at]).astype(jnp.float32) + one[:, None] * new[None]
            for i in range(count - 1):
                one = plgpu.load(keys.at[layer, row, group, jnp.int32(i), some])
                two = plgpu.load(old_news.at[layer, row, head, jnp.int32(i), part])
                left = jnp.sum(jnp.where(past == i, share, 0.0))
                end += one[:, None] * (left * two)[None]
            plgpu.store(kept_states.at[at], end.astype(kept_states.dtype))

        jax.lax.fori_loop(0, key_width // size, write, None)


class Tiles(NamedTuple):
    """Rows sorted by expert, in tiles of `TILE_ROWS` rows of one expert each."""

    experts: Array  # int32 [tiles]; the number of experts for a tile of none
    rows: Array  # int32 [tiles * TILE_ROWS]: which row stands at each place


TILE_ROWS = 128
# Columns of a tile, depth of a step, warps, stages: the fastest of 12 and 9 at the shape of
# Qwen3-30B-A3B on an H200, 520 and 505 TFLOP/s; the first makes gate and up at once.
_WIDEN, _NARROW = (128, 64, 8, 3), (256, 64, 8, 3)


def tiles_fit(gate: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether the kernels of experts take weights `[E, F, D]` of this shape."""
    _, size, width = gate
    half = dtype in (jnp.bfloat16, jnp.float16)
    return half and size % _WIDEN[0] == 0 and width % _NARROW[0] == 0


def widen_tiles(
    tiles: Tiles,
    rows: Float[Array, "N D"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    *,
    interpret: bool = False,
) -> Float[Array, "P F"]:
    """silu(x gate^T) * (x up^T) for the row x at each place, by its tile's expert.

    Rows are gathered as they are read: to write them in order first takes .4 ms of 1.6. Places of
    tiles without an expert stay unwritten.
    """
    return _multiply_tiles(tiles, (tiles.rows, rows), (gate, up), _WIDEN, interpret)


def narrow_tiles(
    tiles: Tiles,
    hidden: Float[Array, "P F"],
    down: Float[Array, "E D F"],
    *,
    interpret: bool = False,
) -> Float[Array, "P D"]:
    """x down^T for the row x at each place, by its tile's expert; as `widen_tiles` otherwise."""
    return _multiply_tiles(tiles, (hidden,), (down,), _NARROW, interpret)


def _multiply_tiles(
    tiles: Tiles,
    rows: tuple[Array, ...],
    weights: tuple[Array, ...],
    settings: tuple[int, int, int, int],
    interpret: bool,
) -> Array:
    """`rows` are those of the places; or which row stands at each place, then all rows."""
    count, size, width = weights[0].shape
    columns, depth, warps, stages = settings
    across = size // columns
    return pl.pallas_call(
        functools.partial(_multiply, len(rows) > 1, count, width, columns, depth, across),
        grid=(tiles.experts.shape[0] * across,),
        out_shape=jax.ShapeDtypeStruct((tiles.rows.shape[0], size), rows[-1].dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(tiles.experts, *rows, *weights)


def _multiply(gathered, count, width, columns, depth, across, experts, *refs):
    """One tile's columns; refs: which rows if `gathered`, rows, one weight or two, the result."""
    chosen, (x, *weights, out) = refs[:gathered], refs[gathered:]
    tile, part = pl.program_id(0) // across, pl.program_id(0) % across
    expert = plgpu.load(experts.at[tile])

    @pl.when(expert < count)
    def _():
        place = tile * TILE_ROWS + jnp.arange(TILE_ROWS, dtype=jnp.int32)
        row = (plgpu.load(chosen[0].at[place]) if gathered else place)[:, None]
        column = (part * columns + jnp.arange(columns, dtype=jnp.int32))[:, None]

        def add(step, sums):
            inner = (step * depth + jnp.arange(depth, dtype=jnp.int32))[None, :]
            a = plgpu.load(x.at[row, inner])
            pieces = [plgpu.load(weight.at[expert, column, inner]) for weight in weights]
            products = (plgpu.dot(a, piece, trans_b=True) for piece in pieces)
            return tuple(total + y for total, y in zip(sums, products, strict=True))

        zero = jnp.zeros((TILE_ROWS, columns), jnp.float32)
        y, *up = jax.lax.fori_loop(0, width // depth, add, (zero,) * len(weights))
        if up:
            y = y * jax.nn.sigmoid(y) * up[0]
        plgpu.store(out.at[place[:, None], column.reshape(1, -1)], y.astype(out.dtype))


def _blocks(width: int) -> list[tuple[int, int]]:
    """(start, size) of pieces whose sizes are powers of two, as Triton wants them."""
    blocks, start = [], 0
    while start < width:
        size = min(_WIDTH_BLOCK, 1 << (width - start).bit_length() - 1)
        blocks.append((start, max(size, 128)))
        start += blocks[-1][1]
    return blocks
