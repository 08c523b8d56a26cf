"""The gated delta rule in chunks of positions, as flash-linear-attention names its kernels.

`chunk_gated_delta_rule` reads queries, keys and values where they lie. Three kernels go forward:
`_solve_tril` inverts how each chunk's positions mix (the UT transform), for all chunks at once;
`_chunk_fwd_h` passes the states from chunk to chunk; `_chunk_fwd_o` makes the outputs. Without
gradients `_chunk_fwd_h_o` does the last two. Four go backward, which read the inverses, the states
before chunks (h) and the corrected values (v_new), and make the rest again.

Products of 64 rows are for 4 warps: Triton has 8 make most of them twice. A kernel of many products
holds where each operand lies in registers, 4 a step of 16, above all within a loop: so there are
several kernels, and matrices that are needed transposed too are made twice, or stored and loaded.

Letters are those of `models.delta`; P is B H, one state each.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from kdjax.models.kernels.common import iota, plgpu

_WARPS = 4  # of a program
# Columns of a state that one program passes on, and chunks that it has loaded at once; of one that
# makes outputs too.
_STATE_COLUMNS, _STAGES, _ALL_STAGES = 64, 2, 1


def states_fit(keys: int, values: int, dtype: DTypeLike) -> bool:
    """Whether kernels take states of this shape: half precision, powers of two.

    Chunks of states of 256 by 256 need 295 kB of shared memory; a processor has 232.
    """
    sizes = all(16 <= n <= 128 and n & (n - 1) == 0 for n in (keys, values))
    return sizes and jnp.dtype(dtype).itemsize == 2


class _Decays(NamedTuple):
    """Decays between positions of a chunk, and of the state before the chunk."""

    beta: Array  # [C]
    total: Array  # [C], the cumulative sum of g since the chunk began
    documents: Array  # [C], segment ids
    from_start: Array  # [C], share of the state before the chunk that a position reads
    to_end: Array  # [C], share of a position's update that is left at the chunk's end
    through: Array  # share of the state before the chunk that is left at its end

    def decay_pairs(self) -> Array:
        """`[C, C]`: e^-|g| between two positions of a document, 0 between two documents."""
        gaps = jnp.abs(self.total[:, None] - self.total[None])
        return jnp.where(self.documents[:, None] == self.documents[None], jnp.exp(-gaps), 0.0)


class _HeadChunk(NamedTuple):
    """The chunk of a row's head that a program computes."""

    row: Array
    head: Array
    group: Array
    number: Array
    state: Array  # among P
    position: Array  # [C], in the row
    inside: Array  # [C], whether the position is below the row's length

    def load(self, ref: Any, head: Array) -> Array:
        """The head's positions of `[B, T, heads, width]`; zeros beyond the row."""
        at = ref.at[self.row, self.position[:, None], head, iota(ref.shape[3])[None]]
        return plgpu.load(at, mask=self.inside[:, None], other=0.0)

    def store(self, ref: Any, value: Array) -> None:
        """Stores the value head's positions of `[B, T, H, width]`."""
        at = ref.at[self.row, self.position[:, None], self.head, iota(ref.shape[3])[None]]
        plgpu.store(at, value.astype(ref.dtype), mask=self.inside[:, None])

    def store_number(self, ref: Any, value: Array) -> None:
        """Stores one number a position, of the value head's `[B, T, H]`."""
        plgpu.store(ref.at[self.row, self.position, self.head], value, mask=self.inside)

    def matrix(self, ref: Any) -> Any:
        """The chunk's matrix of `[N, P, rows, columns]`."""
        rows, columns = (iota(count) for count in ref.shape[2:])
        return ref.at[self.number, self.state, rows[:, None], columns[None]]

    def below(self) -> Array:
        """Whether a row's position is after a column's."""
        return self.position[:, None] > self.position[None]


def _locate_chunk(size: int, length: int, groups: int) -> _HeadChunk:
    row, number, head = (pl.program_id(i) for i in range(3))
    position = number * size + iota(size)
    state = row * pl.num_programs(2) + head
    return _HeadChunk(row, head, head % groups, number, state, position, position < length)


def _load_decays(chunk: _HeadChunk, decay: Any, beta: Any, ids: Any) -> _Decays:
    size, last = chunk.position.shape[0], ids.shape[1] - 1
    row, position, begin = chunk.row, chunk.position, chunk.number * size
    fade, share = (
        plgpu.load(x.at[row, position, chunk.head], mask=chunk.inside, other=0.0)
        for x in (decay, beta)
    )
    documents = plgpu.load(ids.at[row, jnp.minimum(position, last)])
    before = plgpu.load(ids.at[row, jnp.maximum(begin - 1, 0)])
    end = plgpu.load(ids.at[row, jnp.minimum(begin + size - 1, last)])
    # Differences of sums of 1,000 are 6e-5 off in float32, which bfloat16 (4e-3) does not see.
    total, whole = jnp.cumsum(fade), jnp.sum(fade)
    return _Decays(
        share,
        total,
        documents,
        jnp.where(documents == before, jnp.exp(total), 0.0),
        jnp.where(documents == end, jnp.exp(whole - total), 0.0),
        jnp.where(end == before, jnp.exp(whole), 0.0),
    )


def _scale_rows(x: Array, factor: Array) -> Array:
    """Multiplies each row by its factor, in float32, and rounds to the rows' dtype."""
    return (x.astype(jnp.float32) * factor[:, None]).astype(x.dtype)


def invert_blocks(lower: Array, multiply: Any) -> Array:
    """(I + lower)^-1 of strictly lower triangular matrices; a join of blocks is two full products.

    The inverse of [[P, 0], [Q, S]] is [[P', 0], [-S' Q P', S']].
    """
    size, block = lower.shape[-1], 1
    place = iota(size)
    identity = (place[:, None] == place[None]).astype(lower.dtype)
    inverse = jnp.broadcast_to(identity, lower.shape)
    while block < size:
        half, pair = place // block, place // (2 * block)
        join = (pair[:, None] == pair[None]) & (half[:, None] > half[None])
        part = jnp.where(join, lower, 0.0)
        if block > 1:
            part = multiply(multiply(inverse, part), inverse)
        inverse, block = inverse - part, 2 * block
    return inverse


def _multiply_split(first: Array, second: Array) -> Array:
    """A float32 product within 1e-5, by three bfloat16 ones: TF32 would lay operands out anew."""
    (a, b), (c, d) = _split_halves(first), _split_halves(second)
    return plgpu.dot(a, c) + plgpu.dot(a, d) + plgpu.dot(b, c)


def _split_halves(x: Array) -> tuple[Array, Array]:
    """Two bfloat16 whose sum is x within 1e-5."""
    most = x.astype(jnp.bfloat16)
    return most, (x - most.astype(jnp.float32)).astype(jnp.bfloat16)


def _run_chunks(
    kernel: Any,
    sizes: tuple[int, int],
    shape: Any,
    groups: int,
    outs: Any,
    *inputs: Any,
) -> Any:
    """Runs one program for each chunk of each value head; `shape` is that of v `[B, T, H, V]`."""
    (size, _), (rows, length, heads, _) = sizes, shape
    return pl.pallas_call(
        functools.partial(kernel, functools.partial(_locate_chunk, size, length, groups)),
        grid=(rows, pl.cdiv(length, size), heads),
        out_shape=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=sizes[1],
    )(*inputs)


class _Inputs(NamedTuple):
    """Inputs of the kernels."""

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]
    decay: Float32[Array, "B T H"]
    beta: Float32[Array, "B T H"]
    ids: Int[Array, "B T"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def chunk_gated_delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    segment_ids: Int[Array, "B T"],
    state: Float32[Array, "B H K V"],
    size: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Computes `delta.apply_delta_rule` in chunks of `size`; q, k and v of one half precision."""
    rule = _Inputs(q, k, v, decay, beta, segment_ids)
    return _run_forward(rule, state, size, interpret, save=False)[0]


def _run_forward(rule: _Inputs, state: Array, size: int, interpret: bool, *, save: bool) -> Any:
    """Outputs, last states; to `save`, also inverses, decays, states before chunks (h) and v_new.

    Without `save`, `_chunk_fwd_h_o` makes outputs as it passes the states and writes no h.
    """
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    (rows, length, heads, width), chunk = shape, (size, interpret)
    lead = pl.cdiv(length, size), rows * heads
    outs = [((*lead, size, size), dtype), (lead, jnp.float32), *[((*lead, size), jnp.float32)] * 2]
    outs += [] if save else outs[:1]
    inputs = rule.q, rule.k, *rule[3:]
    inverse, through, from_start, to_end, *scores = _run_chunks(
        _solve_tril, chunk, shape, groups, outs, *inputs
    )
    prepared = inverse, from_start, to_end, through, rule.beta
    first = state.reshape(-1, *state.shape[2:])
    if save:
        h = jax.ShapeDtypeStruct((*lead, keys, width), dtype)
        v_new = jax.ShapeDtypeStruct((*lead, size, width), dtype)
        given, outs = (first, *prepared, rule.k, rule.v), (first, h, v_new)
        last, h, v_new = _run_states(_chunk_fwd_h, heads, size, given, outs, interpret, 0)
        saved = prepared[:4], h, v_new
        inputs, outs = (*inputs, h, v_new), [(shape, dtype)]
        (out,) = _run_chunks(_chunk_fwd_o, chunk, shape, groups, outs, *inputs)
    else:
        given, outs = (first, *prepared, rule.k, rule.v, rule.q, *scores), (first, rule.v)
        last, out = _run_states(_chunk_fwd_h_o, heads, size, given, outs, interpret)
        saved = None
    return (out, last.reshape(state.shape)), saved


def _solve_tril(locate, q, k, decay, beta, ids, inverse, through, from_start, to_end, *scores):
    """The UT transform: (I + M)^-1, M = tril(diag(beta) (k k^T * decays), -1), and the decays.

    With `scores` also the scores of queries, for `_chunk_fwd_h_o`.
    """
    chunk = locate()
    decays = _load_decays(chunk, decay, beta, ids)
    at = chunk.number, chunk.state
    plgpu.store(through.at[at], decays.through)
    for ref, share in ((from_start, decays.from_start), (to_end, decays.to_end)):
        plgpu.store(ref.at[*at, iota(ref.shape[2])], share)
    keys = chunk.load(k, chunk.group)
    for ref in scores:
        plgpu.store(
            chunk.matrix(ref), _score_queries(chunk, chunk.load(q, chunk.group), keys, decays)
        )
    mixing = jnp.where(chunk.below(), decays.beta[:, None] * decays.decay_pairs(), 0.0)
    mixing *= plgpu.dot(keys, keys, trans_b=True)
    plgpu.store(chunk.matrix(inverse), invert_blocks(mixing, _multiply_split).astype(inverse.dtype))


def _score_queries(chunk: _HeadChunk, queries: Array, keys: Array, decays: _Decays) -> Array:
    """Decayed scores of queries and keys, `tril(q k^T * decays)`: what queries read of v_new."""
    pairs = plgpu.dot(queries, keys, trans_b=True) * decays.decay_pairs()
    return jnp.where(chunk.below().T, 0.0, pairs).astype(keys.dtype)


def _score_queries_transposed(
    chunk: _HeadChunk, queries: Array, keys: Array, decays: _Decays
) -> Array:
    """`_score_queries`, transposed: another product is quicker than transposing."""
    pairs = plgpu.dot(keys, queries, trans_b=True) * decays.decay_pairs()
    return jnp.where(chunk.below(), 0.0, pairs).astype(keys.dtype)


def _chunk_fwd_o(locate, q, k, decay, beta, ids, h, v_new, out):
    """Outputs: what queries read of the state before the chunk, and of the chunk's v_new."""
    chunk = locate()
    decays = _load_decays(chunk, decay, beta, ids)
    queries, keys = (chunk.load(x, chunk.group) for x in (q, k))
    scores = _score_queries(chunk, queries, keys, decays)
    result = decays.from_start[:, None] * plgpu.dot(queries, plgpu.load(chunk.matrix(h)))
    chunk.store(out, result + plgpu.dot(scores, plgpu.load(chunk.matrix(v_new))))


def _run_states(
    kernel: Any,
    heads: int,
    size: int,
    inputs: Any,
    outs: Any,
    interpret: bool,
    place: int | None = None,
) -> Any:
    """Runs a program for some columns of each state; input and output `place` share memory."""
    count, (states, _, width) = inputs[1].shape[0], outs[0].shape
    columns, stages = min(_STATE_COLUMNS, width), _ALL_STAGES if place is None else _STAGES
    return pl.pallas_call(
        functools.partial(kernel, functools.partial(_locate_columns, columns, heads, size), count),
        grid=(states, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        input_output_aliases={} if place is None else {place: place},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=stages),
        interpret=interpret,
    )(*inputs)


class _StateColumns(NamedTuple):
    """Columns of a state that one program passes from chunk to chunk."""

    state: Array  # among P
    row: Array
    head: Array
    position: Array  # [C, 1]
    column: Array  # [1, columns]

    def load(self, ref: Any, n: Array, columns: Any = None) -> Array:
        """Chunk n of the state's head, of `[B, T, heads, width]`; zeros beyond the row."""
        columns = iota(ref.shape[3])[None] if columns is None else columns
        position = n * self.position.shape[0] + self.position
        at = ref.at[self.row, position, self.head % ref.shape[2], columns]
        return plgpu.load(at, mask=position < ref.shape[1], other=0.0)

    def load_beta(self, beta: Any, n: Array) -> Array:
        """Beta `[C, 1]` of the positions of chunk n."""
        position = n * self.position.shape[0] + self.position
        at = beta.at[self.row, position, self.head]
        return plgpu.load(at, mask=position < beta.shape[1], other=0.0)

    def load_shares(self, shares: Any, n: Array) -> Array:
        """One number for each position of chunk n, `[C, 1]`."""
        return plgpu.load(shares.at[n, self.state, self.position])

    def load_pairs(self, pairs: Any, n: Array) -> Array:
        """The matrix `[C, C]` of chunk n."""
        return plgpu.load(pairs.at[n, self.state, self.position, iota(pairs.shape[3])[None]])

    def values_at(self, values: Any, n: Array) -> Any:
        """The place of these columns in chunk n of `[N, P, C, V]`."""
        return values.at[n, self.state, self.position, self.column]

    def state_at(self, states: Any, *n: Array) -> Any:
        """The place of these columns in `[P, K, V]`, or in chunk n of `[N, P, K, V]`."""
        return states.at[*n, self.state, iota(states.shape[-2])[:, None], self.column]


def _locate_columns(columns: int, heads: int, size: int) -> _StateColumns:
    state = pl.program_id(0)
    column = pl.program_id(1) * columns + iota(columns)
    return _StateColumns(state, state // heads, state % heads, iota(size)[:, None], column[None])


def _advance_state(
    at: _StateColumns, refs: Any, n: Array, state: Array, half: Array, v_new: Any = None
) -> Any:
    """The state after chunk n, and v_new: (I + M)^-1 times beta (v - S^T k)."""
    inverse, from_start, to_end, through, beta, k, v = refs
    keys, values = at.load(k, n), at.load(v, n, at.column).astype(jnp.float32)
    missing = values - at.load_shares(from_start, n) * plgpu.dot(keys, half)
    missing = (at.load_beta(beta, n) * missing).astype(half.dtype)
    new = plgpu.dot(at.load_pairs(inverse, n), missing)
    if v_new is not None:
        plgpu.store(at.values_at(v_new, n), new.astype(v_new.dtype))
    left = (at.load_shares(to_end, n) * new).astype(half.dtype)
    update = plgpu.dot(keys, left, trans_a=True)
    return state * plgpu.load(through.at[n, at.state]) + update, new.astype(half.dtype)


def _chunk_fwd_h(locate, count: int, state, *refs):
    """The inter-chunk recurrence: the state before each chunk (h), and each chunk's v_new."""
    inputs, (last, h, v_new) = refs[:-3], refs[-3:]
    at = locate()

    def step(n, s):
        half = s.astype(h.dtype)
        plgpu.store(at.state_at(h, n), half)
        return _advance_state(at, inputs, n, s, half, v_new)[0]

    first = plgpu.load(at.state_at(state))
    plgpu.store(at.state_at(last), jax.lax.fori_loop(0, count, step, first))


def _chunk_fwd_h_o(locate, count: int, state, *refs):
    """`_chunk_fwd_h` and `_chunk_fwd_o` in one, which stores neither h nor v_new."""
    (*inputs, q, scores), (last, out) = refs[:-2], refs[-2:]
    at = locate()

    def step(n, s):
        half = s.astype(out.dtype)
        s, new = _advance_state(at, inputs, n, s, half)
        result = at.load_shares(inputs[1], n) * plgpu.dot(at.load(q, n), half)
        result += plgpu.dot(at.load_pairs(scores, n), new)
        position = n * at.position.shape[0] + at.position
        to = out.at[at.row, position, at.head, at.column]
        plgpu.store(to, result.astype(out.dtype), mask=position < out.shape[1])
        return s

    first = plgpu.load(at.state_at(state))
    plgpu.store(at.state_at(last), jax.lax.fori_loop(0, count, step, first))


def _chunk_bwd_dhu(
    locate,
    count: int,
    dht,
    inverse,
    from_start,
    to_end,
    through,
    beta,
    k,
    dv_local,
    dh_local,
    *outs,
):
    """From the last chunk to the first: gradients of the states after chunks (dh), and of u.

    du is (I + M)^-T times the gradient of v_new; dh0 is the gradient of the first state.
    """
    dh0, dh, du = outs
    at = locate()

    def step(i, g):
        n, half = count - 1 - i, g.astype(dh.dtype)
        plgpu.store(at.state_at(dh, n), half)
        keys = at.load(k, n)
        dnew = plgpu.load(at.values_at(dv_local, n)).astype(jnp.float32)
        dnew += at.load_shares(to_end, n) * plgpu.dot(keys, half)
        dnew = plgpu.dot(at.load_pairs(inverse, n), dnew.astype(half.dtype), trans_a=True)
        plgpu.store(at.values_at(du, n), dnew.astype(du.dtype))
        known = at.load_beta(beta, n) * at.load_shares(from_start, n) * dnew
        g = g * plgpu.load(through.at[n, at.state])
        g += plgpu.load(at.state_at(dh_local, n)).astype(jnp.float32)
        return g - plgpu.dot(keys, known.astype(half.dtype), trans_a=True)

    start = plgpu.load(at.state_at(dht))
    plgpu.store(at.state_at(dh0), jax.lax.fori_loop(0, count, step, start))


def _run_backward(size: int, interpret: bool, residuals: Any, gradients: Any) -> Any:
    rule, (prepared, h, v_new) = residuals
    do, dht = gradients
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    chunk = size, interpret
    outs = [(x.shape, dtype) for x in (v_new, h)]
    inputs = rule.q, rule.k, *rule[3:], do
    dv_local, dh_local = _run_chunks(_chunk_bwd_dv_local, chunk, shape, groups, outs, *inputs)
    last = dht.reshape(-1, keys, shape[3])
    inputs = last, *prepared, rule.beta, rule.k, dv_local, dh_local
    outs = last, h, v_new
    dh0, dh, du = _run_states(_chunk_bwd_dhu, shape[2], size, inputs, outs, interpret, 0)
    pairs, number = ((*v_new.shape[:2], size, size), dtype), (shape[:3], jnp.float32)
    outs, inputs = [(shape, dtype), number, pairs, pairs], (rule.v, *rule[3:], v_new, du, do)
    dv, dbeta, *pairs = _run_chunks(_prepare_wy_repr_bwd, chunk, shape, groups, outs, *inputs)
    key = (*shape[:3], keys), dtype
    outs = key, key, number, number
    inputs = rule.q, rule.k, *rule[3:], h, dh, v_new, du, *pairs, do
    dq, dk, dg, dshare = _run_chunks(_chunk_bwd_dqkg, chunk, shape, groups, outs, *inputs)
    if shape[2] > groups:  # of all value heads that read a key head
        split = *shape[:2], -1, groups, keys
        dq, dk = (
            jnp.sum(x.reshape(split).astype(jnp.float32), axis=2).astype(dtype) for x in (dq, dk)
        )
    return dq, dk, dv, dg, dbeta + dshare, None, dh0.reshape(dht.shape)


def _chunk_bwd_dv_local(locate, q, k, decay, beta, ids, do, dv_local, dh_local):
    """Gradients of `_chunk_fwd_o` by v_new and by h, which `_chunk_bwd_dhu` needs first."""
    chunk = locate()
    decays = _load_decays(chunk, decay, beta, ids)
    queries, keys = (chunk.load(x, chunk.group) for x in (q, k))
    outs = chunk.load(do, chunk.head)
    scores = _score_queries_transposed(chunk, queries, keys, decays)
    plgpu.store(chunk.matrix(dv_local), plgpu.dot(scores, outs).astype(dv_local.dtype))
    outs = _scale_rows(outs, decays.from_start)
    plgpu.store(
        chunk.matrix(dh_local), plgpu.dot(queries, outs, trans_a=True).astype(dh_local.dtype)
    )


def _prepare_wy_repr_bwd(locate, v, decay, beta, ids, v_new, du, do, dv, dbeta, dscores, dmixing):
    """Gradients of v, of beta by v, of the scores and of M."""
    chunk = locate()
    decays = _load_decays(chunk, decay, beta, ids)
    new, dnew = (plgpu.load(chunk.matrix(x)) for x in (v_new, du))
    plgpu.store(
        chunk.matrix(dscores), _score_queries(chunk, chunk.load(do, chunk.head), new, decays)
    )
    pairs = jnp.where(chunk.below(), -decays.decay_pairs(), 0.0)
    pairs *= plgpu.dot(dnew, new, trans_b=True)
    plgpu.store(chunk.matrix(dmixing), pairs.astype(dmixing.dtype))
    exact, values = (x.astype(jnp.float32) for x in (dnew, chunk.load(v, chunk.head)))
    chunk.store(dv, decays.beta[:, None] * exact)
    chunk.store_number(dbeta, jnp.sum(exact * values, axis=1))


def _chunk_bwd_dqkg(locate, q, k, decay, beta, ids, h, dh, v_new, du, dscores, dmixing, do, *outs):
    """Gradients of queries and keys, and what these add to decay's and beta's.

    (I + M) v_new = u - w S, with u = beta v, w = beta from_start k. Where y is (I + M)^-T times the
    gradient of v_new (`du`), the gradient of u is y, that of w is -y S^T, that of M is -y v_new^T.
    Each term of a query's or a key's gradient, times the query or the key, is the gradient of g at
    the term's position: plus for what the position reads, minus for what others read of it.
    """
    dq, dk, dg, dbeta = outs
    chunk = locate()
    decays = _load_decays(chunk, decay, beta, ids)
    state = plgpu.load(chunk.matrix(h))
    keys = chunk.load(k, chunk.group)
    score_gradient = plgpu.load(chunk.matrix(dscores))
    gradient = decays.from_start[:, None] * plgpu.dot(
        chunk.load(do, chunk.head), state, trans_b=True
    )
    gradient += plgpu.dot(score_gradient, keys)
    chunk.store(dq, gradient)
    queries = chunk.load(q, chunk.group)
    dtotal = jnp.sum(gradient * queries.astype(jnp.float32), axis=1)

    pairs, exact = plgpu.load(chunk.matrix(dmixing)), keys.astype(jnp.float32)
    dnew = plgpu.load(chunk.matrix(du))
    gradient = -decays.from_start[:, None] * plgpu.dot(dnew, state, trans_b=True)
    gradient += plgpu.dot(pairs, keys)
    dshare = jnp.sum(gradient * exact, axis=1)
    gradient *= decays.beta[:, None]
    gradient += plgpu.dot(pairs, _scale_rows(keys, decays.beta), trans_a=True)
    gradient += plgpu.dot(score_gradient, queries, trans_a=True)
    dstate = plgpu.load(chunk.matrix(dh))
    kept = plgpu.dot(plgpu.load(chunk.matrix(v_new)), dstate, trans_b=True)
    kept *= decays.to_end[:, None]
    dend = jnp.sum(kept * exact, axis=1)
    gradient += kept
    chunk.store(dk, gradient)
    dtotal += 2 * decays.beta * dshare - jnp.sum(gradient * exact, axis=1)
    # The diagonal of a full product: an elementwise one would need both operands in registers.
    both = plgpu.dot(dstate, state, trans_b=True)
    column = iota(k.shape[3])
    dthrough = jnp.sum(jnp.where(column[:, None] == column[None], both, 0.0))
    dfade = dtotal - jnp.cumsum(dtotal) + jnp.sum(dtotal + dend)
    dfade += decays.through * dthrough
    chunk.store_number(dg, dfade)
    chunk.store_number(dbeta, dshare)


def _forward(q, k, v, decay, beta, segment_ids, state, size, interpret) -> Any:
    rule = _Inputs(q, k, v, decay, beta, segment_ids)
    outs, saved = _run_forward(rule, state, size, interpret, save=True)
    return outs, (rule, saved)


chunk_gated_delta_rule.defvjp(_forward, _run_backward)
