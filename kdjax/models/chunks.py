"""Triton kernels of the gated delta rule, beside its definition in `models.delta`.

`apply_delta_rule` reads queries, keys and values where they lie. Three kernels go forward: of each
chunk how its positions mix, for all chunks at once; the states, a chunk after the other; the
outputs. Four go back, which keep the inverses, the states before chunks and the news, and make the
rest again. `make_heads` is the convolution and what follows it up to the rule.

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
from jaxtyping import Array, Float, Float32, Int

from kdjax.models.kernels import plgpu

_WARPS = 4  # of a program
# Columns of a state that one program passes on, and chunks that it has loaded at once; of one that
# makes outputs too.
_STATE_COLUMNS, _STAGES, _ALL_STAGES = 64, 2, 1


class _Fades(NamedTuple):
    """Shares that a chunk's positions keep of each other and of the state before them."""

    beta: Array  # [C]
    since: Array  # [C], the logarithm of what is kept since the chunk began
    own: Array  # [C], documents
    carried: Array  # [C], of the state before
    to_end: Array  # [C], of a position at the chunk's end
    stays: Array  # of the state before, at the chunk's end

    def faded(self) -> Array:
        """`[C, C]`: between two of a document, whichever is the later; else 0."""
        gaps = jnp.abs(self.since[:, None] - self.since[None])
        return jnp.where(self.own[:, None] == self.own[None], jnp.exp(-gaps), 0.0)


class _Place(NamedTuple):
    """Where a program is: a chunk of a row's head."""

    row: Array
    head: Array
    group: Array
    number: Array
    state: Array  # among P
    position: Array  # [C], in the row
    inside: Array  # [C], whether the row is so long

    def load(self, ref: Any, head: Array) -> Array:
        """The head's positions of `[B, T, heads, width]`; zeros beyond the row."""
        at = ref.at[self.row, self.position[:, None], head, _count(ref.shape[3])[None]]
        return plgpu.load(at, mask=self.inside[:, None], other=0.0)

    def store(self, ref: Any, value: Array) -> None:
        """Stores the value head's, as `load` finds them."""
        at = ref.at[self.row, self.position[:, None], self.head, _count(ref.shape[3])[None]]
        plgpu.store(at, value.astype(ref.dtype), mask=self.inside[:, None])

    def store_one(self, ref: Any, value: Array) -> None:
        """Stores a number a position of the value head's, of `[B, T, H]`."""
        plgpu.store(ref.at[self.row, self.position, self.head], value, mask=self.inside)

    def part(self, ref: Any) -> Any:
        """The chunk's matrix of `[N, P, rows, columns]`."""
        rows, columns = (_count(count) for count in ref.shape[2:])
        return ref.at[self.number, self.state, rows[:, None], columns[None]]

    def below(self) -> Array:
        """Whether a row's position is after a column's."""
        return self.position[:, None] > self.position[None]


def _count(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def _find_place(size: int, length: int, groups: int) -> _Place:
    row, number, head = (pl.program_id(i) for i in range(3))
    position = number * size + _count(size)
    state = row * pl.num_programs(2) + head
    return _Place(row, head, head % groups, number, state, position, position < length)


def _read_fades(place: _Place, decay: Any, beta: Any, ids: Any) -> _Fades:
    size, last = place.position.shape[0], ids.shape[1] - 1
    row, position, begin = place.row, place.position, place.number * size
    fade, share = (
        plgpu.load(x.at[row, position, place.head], mask=place.inside, other=0.0)
        for x in (decay, beta)
    )
    own = plgpu.load(ids.at[row, jnp.minimum(position, last)])
    before = plgpu.load(ids.at[row, jnp.maximum(begin - 1, 0)])
    end = plgpu.load(ids.at[row, jnp.minimum(begin + size - 1, last)])
    # Differences of sums of 1,000 are 6e-5 off in float32, which bfloat16 (4e-3) does not see.
    since, whole = jnp.cumsum(fade), jnp.sum(fade)
    return _Fades(
        share,
        since,
        own,
        jnp.where(own == before, jnp.exp(since), 0.0),
        jnp.where(own == end, jnp.exp(whole - since), 0.0),
        jnp.where(end == before, jnp.exp(whole), 0.0),
    )


def _scale(x: Array, factor: Array) -> Array:
    """Rows times a factor each, rounded as they are."""
    return (x.astype(jnp.float32) * factor[:, None]).astype(x.dtype)


def invert_blocks(lower: Array, times: Any) -> Array:
    """(I + lower)^-1 of strictly lower triangular matrices, each join of blocks as whole products.

    The inverse of [[P, 0], [Q, S]] is [[P', 0], [-S' Q P', S']].
    """
    size, block = lower.shape[-1], 1
    place = _count(size)
    own = (place[:, None] == place[None]).astype(lower.dtype)
    inverse = jnp.broadcast_to(own, lower.shape)
    while block < size:
        half, pair = place // block, place // (2 * block)
        join = (pair[:, None] == pair[None]) & (half[:, None] > half[None])
        part = jnp.where(join, lower, 0.0)
        if block > 1:
            part = times(times(inverse, part), inverse)
        inverse, block = inverse - part, 2 * block
    return inverse


def _times(first: Array, second: Array) -> Array:
    """A float32 product, 1e-5 off, by three of halves: TF32's operands must be laid out anew."""
    (a, b), (c, d) = _split(first), _split(second)
    return plgpu.dot(a, c) + plgpu.dot(a, d) + plgpu.dot(b, c)


def _split(x: Array) -> tuple[Array, Array]:
    """Two bfloat16 whose sum it is, but for 1e-5."""
    most = x.astype(jnp.bfloat16)
    return most, (x - most.astype(jnp.float32)).astype(jnp.bfloat16)


def _run(
    kernel: Any,
    sizes: tuple[int, int],
    shape: Any,
    groups: int,
    outs: Any,
    *inputs: Any,
) -> Any:
    """Runs a program a chunk of each head of values `[B, T, H, V]` of this shape."""
    (size, _), (rows, length, heads, _) = sizes, shape
    return pl.pallas_call(
        functools.partial(kernel, functools.partial(_find_place, size, length, groups)),
        grid=(rows, pl.cdiv(length, size), heads),
        out_shape=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=sizes[1],
    )(*inputs)


class _Rule(NamedTuple):
    """Inputs of the rule, as kernels take them."""

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]
    decay: Float32[Array, "B T H"]
    beta: Float32[Array, "B T H"]
    ids: Int[Array, "B T"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def apply_delta_rule(
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
    rule = _Rule(q, k, v, decay, beta, segment_ids)
    return _go_forward(rule, state, size, interpret, keep=False)[0]


def _go_forward(rule: _Rule, state: Array, size: int, interpret: bool, *, keep: bool) -> Any:
    """Outputs and last states; and, to `keep`: inverses, shares, states before chunks, news.

    Without, outputs are made as the states pass, which are then not written.
    """
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    (rows, length, heads, width), chunk = shape, (size, interpret)
    lead = pl.cdiv(length, size), rows * heads
    outs = [((*lead, size, size), dtype), (lead, jnp.float32), *[((*lead, size), jnp.float32)] * 2]
    outs += [] if keep else outs[:1]
    inputs = rule.q, rule.k, *rule[3:]
    inverse, stays, carried, to_end, *reads = _run(_teach, chunk, shape, groups, outs, *inputs)
    taught = inverse, carried, to_end, stays, rule.beta
    first = state.reshape(-1, *state.shape[2:])
    if keep:
        before = jax.ShapeDtypeStruct((*lead, keys, width), dtype)
        news = jax.ShapeDtypeStruct((*lead, size, width), dtype)
        given, outs = (first, *taught, rule.k, rule.v), (first, before, news)
        last, before, news = _run_states(_pass_states, heads, size, given, outs, interpret, 0)
        kept = taught[:4], before, news
        inputs, outs = (*inputs, before, news), [(shape, dtype)]
        (out,) = _run(_say, chunk, shape, groups, outs, *inputs)
    else:
        given, outs = (first, *taught, rule.k, rule.v, rule.q, *reads), (first, rule.v)
        last, out = _run_states(_pass_and_say, heads, size, given, outs, interpret)
        kept = None
    return (out, last.reshape(state.shape)), kept


def _teach(find, q, k, decay, beta, ids, inverse, stays, carried, to_end, *reads):
    """Makes what a chunk's news follow from: how its positions mix, inverted, and its shares.

    And what queries read of the news, if asked for.
    """
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    at = place.number, place.state
    plgpu.store(stays.at[at], fades.stays)
    for ref, share in ((carried, fades.carried), (to_end, fades.to_end)):
        plgpu.store(ref.at[*at, _count(ref.shape[2])], share)
    keys = place.load(k, place.group)
    for ref in reads:
        plgpu.store(place.part(ref), _read(place, place.load(q, place.group), keys, fades))
    mixing = jnp.where(place.below(), fades.beta[:, None] * fades.faded(), 0.0)
    mixing *= plgpu.dot(keys, keys, trans_b=True)
    plgpu.store(place.part(inverse), invert_blocks(mixing, _times).astype(inverse.dtype))


def _read(place: _Place, queries: Array, keys: Array, fades: _Fades) -> Array:
    """Shares of a chunk's news that its queries read."""
    pairs = plgpu.dot(queries, keys, trans_b=True) * fades.faded()
    return jnp.where(place.below().T, 0.0, pairs).astype(keys.dtype)


def _read_back(place: _Place, queries: Array, keys: Array, fades: _Fades) -> Array:
    """`_read`, transposed: a product of its own is quicker than to transpose one."""
    pairs = plgpu.dot(keys, queries, trans_b=True) * fades.faded()
    return jnp.where(place.below(), 0.0, pairs).astype(keys.dtype)


def _say(find, q, k, decay, beta, ids, before, news, out):
    """Tells queries what the state before the chunk says, and its own positions."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    reads = _read(place, queries, keys, fades)
    said = fades.carried[:, None] * plgpu.dot(queries, plgpu.load(place.part(before)))
    place.store(out, said + plgpu.dot(reads, plgpu.load(place.part(news))))


def _run_states(
    kernel: Any,
    heads: int,
    size: int,
    inputs: Any,
    outs: Any,
    interpret: bool,
    place: int | None = None,
) -> Any:
    """Runs a program a part of each state; input `place` lies where the same output will."""
    count, (states, _, width) = inputs[1].shape[0], outs[0].shape
    columns, stages = min(_STATE_COLUMNS, width), _ALL_STAGES if place is None else _STAGES
    return pl.pallas_call(
        functools.partial(kernel, functools.partial(_find_part, columns, heads, size), count),
        grid=(states, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        input_output_aliases={} if place is None else {place: place},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=stages),
        interpret=interpret,
    )(*inputs)


class _Part(NamedTuple):
    """A part of a state that one program passes on: some columns of values."""

    state: Array  # among P
    row: Array
    head: Array
    position: Array  # [C, 1]
    column: Array  # [1, columns]

    def load(self, ref: Any, n: Array, columns: Any = None) -> Array:
        """Chunk n of `[B, T, heads, width]`, the state's head; zeros beyond the row."""
        columns = _count(ref.shape[3])[None] if columns is None else columns
        position = n * self.position.shape[0] + self.position
        at = ref.at[self.row, position, self.head % ref.shape[2], columns]
        return plgpu.load(at, mask=position < ref.shape[1], other=0.0)

    def load_beta(self, beta: Any, n: Array) -> Array:
        """Beta `[C, 1]` of the positions of chunk n."""
        position = n * self.position.shape[0] + self.position
        at = beta.at[self.row, position, self.head]
        return plgpu.load(at, mask=position < beta.shape[1], other=0.0)

    def load_shares(self, shares: Any, n: Array) -> Array:
        """Numbers `[C, 1]` of the positions of chunk n."""
        return plgpu.load(shares.at[n, self.state, self.position])

    def load_pairs(self, pairs: Any, n: Array) -> Array:
        """The matrix `[C, C]` of chunk n."""
        return plgpu.load(pairs.at[n, self.state, self.position, _count(pairs.shape[3])[None]])

    def of_news(self, news: Any, n: Array) -> Any:
        """Where the part's columns of `[N, P, C, V]` lie."""
        return news.at[n, self.state, self.position, self.column]

    def of_state(self, states: Any, *n: Array) -> Any:
        """Where the part of `[P, K, V]` lies, or of chunk n's."""
        return states.at[*n, self.state, _count(states.shape[-2])[:, None], self.column]


def _find_part(columns: int, heads: int, size: int) -> _Part:
    state = pl.program_id(0)
    column = pl.program_id(1) * columns + _count(columns)
    return _Part(state, state // heads, state % heads, _count(size)[:, None], column[None])


def _pass(at: _Part, refs: Any, n: Array, state: Array, half: Array, news: Any = None) -> Any:
    """The state behind chunk n, and its news: what values hold beside what the state says."""
    inverse, carried, to_end, stays, beta, k, v = refs
    keys, values = at.load(k, n), at.load(v, n, at.column).astype(jnp.float32)
    missing = values - at.load_shares(carried, n) * plgpu.dot(keys, half)
    missing = (at.load_beta(beta, n) * missing).astype(half.dtype)
    new = plgpu.dot(at.load_pairs(inverse, n), missing)
    if news is not None:
        plgpu.store(at.of_news(news, n), new.astype(news.dtype))
    left = (at.load_shares(to_end, n) * new).astype(half.dtype)
    learnt = plgpu.dot(keys, left, trans_a=True)
    return state * plgpu.load(stays.at[n, at.state]) + learnt, new.astype(half.dtype)


def _pass_states(find, count: int, state, *refs):
    """The states before each chunk, and its news."""
    given, (last, before, news) = refs[:-3], refs[-3:]
    at = find()

    def turn(n, s):
        half = s.astype(before.dtype)
        plgpu.store(at.of_state(before, n), half)
        return _pass(at, given, n, s, half, news)[0]

    first = plgpu.load(at.of_state(state))
    plgpu.store(at.of_state(last), jax.lax.fori_loop(0, count, turn, first))


def _pass_and_say(find, count: int, state, *refs):
    """`_pass_states` and `_say` in one."""
    (*given, q, reads), (last, out) = refs[:-2], refs[-2:]
    at = find()

    def turn(n, s):
        half = s.astype(out.dtype)
        s, new = _pass(at, given, n, s, half)
        said = at.load_shares(given[1], n) * plgpu.dot(at.load(q, n), half)
        said += plgpu.dot(at.load_pairs(reads, n), new)
        position = n * at.position.shape[0] + at.position
        to = out.at[at.row, position, at.head, at.column]
        plgpu.store(to, said.astype(out.dtype), mask=position < out.shape[1])
        return s

    first = plgpu.load(at.of_state(state))
    plgpu.store(at.of_state(last), jax.lax.fori_loop(0, count, turn, first))


def _pass_gradients(
    find, count: int, last, inverse, carried, to_end, stays, beta, k, of_news, of_before, *outs
):
    """From the last chunk to the first: the gradient of the state, that behind each chunk.

    And `given`: that of what a chunk's positions add to its news, of the news times (I + M)^-T.
    """
    first, after, given = outs
    at = find()

    def turn(i, g):
        n, half = count - 1 - i, g.astype(after.dtype)
        plgpu.store(at.of_state(after, n), half)
        keys = at.load(k, n)
        new = plgpu.load(at.of_news(of_news, n)).astype(jnp.float32)
        new += at.load_shares(to_end, n) * plgpu.dot(keys, half)
        new = plgpu.dot(at.load_pairs(inverse, n), new.astype(half.dtype), trans_a=True)
        plgpu.store(at.of_news(given, n), new.astype(given.dtype))
        known = at.load_beta(beta, n) * at.load_shares(carried, n) * new
        g = g * plgpu.load(stays.at[n, at.state])
        g += plgpu.load(at.of_state(of_before, n)).astype(jnp.float32)
        return g - plgpu.dot(keys, known.astype(half.dtype), trans_a=True)

    start = plgpu.load(at.of_state(last))
    plgpu.store(at.of_state(first), jax.lax.fori_loop(0, count, turn, start))


def _go_back(size: int, interpret: bool, residuals: Any, gradients: Any) -> Any:
    rule, (taught, before, news) = residuals
    of_out, of_last = gradients
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    chunk = size, interpret
    outs = [(x.shape, dtype) for x in (news, before)]
    inputs = rule.q, rule.k, *rule[3:], of_out
    of_news, of_before = _run(_ask_back, chunk, shape, groups, outs, *inputs)
    last = of_last.reshape(-1, keys, shape[3])
    inputs = last, *taught, rule.beta, rule.k, of_news, of_before
    outs = last, before, news
    first, after, given = _run_states(_pass_gradients, shape[2], size, inputs, outs, interpret, 0)
    pairs, of_one = ((*news.shape[:2], size, size), dtype), (shape[:3], jnp.float32)
    outs, inputs = [(shape, dtype), of_one, pairs, pairs], (rule.v, *rule[3:], news, given, of_out)
    of_v, of_beta, *pairs = _run(_mix_back, chunk, shape, groups, outs, *inputs)
    of_key = (*shape[:3], keys), dtype
    outs = of_key, of_key, of_one, of_one
    inputs = rule.q, rule.k, *rule[3:], before, after, news, given, *pairs, of_out
    of_q, of_k, of_decay, of_share = _run(_teach_back, chunk, shape, groups, outs, *inputs)
    if shape[2] > groups:  # of all value heads that read a key head
        split = *shape[:2], -1, groups, keys
        of_q, of_k = (
            jnp.sum(x.reshape(split).astype(jnp.float32), axis=2).astype(dtype)
            for x in (of_q, of_k)
        )
    return of_q, of_k, of_v, of_decay, of_beta + of_share, None, first.reshape(of_last.shape)


def _ask_back(find, q, k, decay, beta, ids, of_out, of_news, of_before):
    """Gradients of `_say` that the states wait for."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    asked = place.load(of_out, place.head)
    reads = _read_back(place, queries, keys, fades)
    plgpu.store(place.part(of_news), plgpu.dot(reads, asked).astype(of_news.dtype))
    asked = _scale(asked, fades.carried)
    plgpu.store(
        place.part(of_before), plgpu.dot(queries, asked, trans_a=True).astype(of_before.dtype)
    )


def _mix_back(find, v, decay, beta, ids, news, given, of_out, of_v, of_beta, read, mixed):
    """Gradients of values, and of how positions mix: what queries read, and what news are of."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    taught, learnt = (plgpu.load(place.part(x)) for x in (news, given))
    plgpu.store(place.part(read), _read(place, place.load(of_out, place.head), taught, fades))
    pairs = jnp.where(place.below(), -fades.faded(), 0.0)
    pairs *= plgpu.dot(learnt, taught, trans_b=True)
    plgpu.store(place.part(mixed), pairs.astype(mixed.dtype))
    exact, values = (x.astype(jnp.float32) for x in (learnt, place.load(v, place.head)))
    place.store(of_v, fades.beta[:, None] * exact)
    place.store_one(of_beta, jnp.sum(exact * values, axis=1))


def _teach_back(
    find, q, k, decay, beta, ids, before, after, news, given, read, mixed, of_out, *outs
):
    """Gradients of queries and keys, and what these add to decay's and beta's.

    (I + M) news = w - u S, with w = beta v, u = beta carried k. Where y is (I + M)^-T times the
    gradient of news (`given`), that of w is y, that of u is -y S^T, that of M is -y news^T. Each
    term of a query's or a key's gradient, times it, is that of the fade at the term's position: of
    what it reads or is mixed with, plus; of what is read or mixed of it, minus.
    """
    of_q, of_k, of_decay, of_beta = outs
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    state = plgpu.load(place.part(before))
    keys = place.load(k, place.group)
    reads = plgpu.load(place.part(read))
    made = fades.carried[:, None] * plgpu.dot(place.load(of_out, place.head), state, trans_b=True)
    made += plgpu.dot(reads, keys)
    place.store(of_q, made)
    queries = place.load(q, place.group)
    of_since = jnp.sum(made * queries.astype(jnp.float32), axis=1)

    pairs, exact = plgpu.load(place.part(mixed)), keys.astype(jnp.float32)
    learnt = plgpu.load(place.part(given))
    made = -fades.carried[:, None] * plgpu.dot(learnt, state, trans_b=True)
    made += plgpu.dot(pairs, keys)
    of_share = jnp.sum(made * exact, axis=1)
    made *= fades.beta[:, None]
    made += plgpu.dot(pairs, _scale(keys, fades.beta), trans_a=True)
    made += plgpu.dot(reads, queries, trans_a=True)
    behind = plgpu.load(place.part(after))
    kept = plgpu.dot(plgpu.load(place.part(news)), behind, trans_b=True)
    kept *= fades.to_end[:, None]
    of_end = jnp.sum(kept * exact, axis=1)
    made += kept
    place.store(of_k, made)
    of_since += 2 * fades.beta * of_share - jnp.sum(made * exact, axis=1)
    # A product's diagonal: both lie ready for one, while their own product would fill registers.
    both = plgpu.dot(behind, state, trans_b=True)
    column = _count(k.shape[3])
    of_whole = jnp.sum(jnp.where(column[:, None] == column[None], both, 0.0))
    of_fade = of_since - jnp.cumsum(of_since) + jnp.sum(of_since + of_end)
    of_fade += fades.stays * of_whole
    place.store_one(of_decay, of_fade)
    place.store_one(of_beta, of_share)


def _rule_forward(q, k, v, decay, beta, segment_ids, state, size, interpret) -> Any:
    rule = _Rule(q, k, v, decay, beta, segment_ids)
    found, kept = _go_forward(rule, state, size, interpret, keep=True)
    return found, (rule, kept)


apply_delta_rule.defvjp(_rule_forward, _go_back)


# Positions of a program that makes heads; those that one going back adds up, as many at a time.
_HEAD_ROWS = 32
_BACK_SPAN, _BACK_ROWS = 256, 8


class _Columns(NamedTuple):
    """Columns of `[B, T, E]` of a program's head: of queries, then keys, then values."""

    row: Array
    tile: Array
    head: Array
    column: Array  # in E
    place: Array  # in the head
    real: Any  # [1, columns], whether it exists; True if all do
    groups: int

    def choose(self, queries: Any, keys: Any, values: Any) -> Array:
        """The one of this head."""
        return jnp.where(
            self.head < self.groups, queries, jnp.where(self.head < 2 * self.groups, keys, values)
        )

    def parts(self, refs: Any, position: Array) -> Any:
        """Places of these positions in queries, keys and values, and which of them are meant."""
        for i, ref in enumerate(refs):
            begin, heads = i * self.groups, ref.shape[2]
            mine = (self.head >= begin) & (self.head < begin + heads)
            head = jnp.clip(self.head - begin, 0, heads - 1)
            yield ref.at[self.row, position[:, None], head, self.place[None]], mine & self.real

    def load(self, refs: Any, position: Array, inside: Array) -> Array:
        """These positions of queries, keys or values, whichever this head is of."""
        begins = 0, self.groups, 2 * self.groups

        def read(ref: Any, begin: int) -> Array:
            at = ref.at[self.row, position[:, None], self.head - begin, self.place[None]]
            return plgpu.load(at, mask=inside & self.real, other=0.0)

        q, k, v = (functools.partial(read, *x) for x in zip(refs, begins, strict=True))
        return jax.lax.cond(
            self.head < self.groups, q, lambda: jax.lax.cond(self.head < 2 * self.groups, k, v)
        )


def _find_columns(groups: int, keys: int, width: int) -> _Columns:
    row, tile, head = (pl.program_id(i) for i in range(3))
    place, is_key = _count(max(keys, width)), head < 2 * groups
    behind = 2 * groups * (keys - width)  # what heads of this width leave out
    start = jnp.where(is_key, head * keys, head * width + behind)
    real = True if keys == width else jnp.where(is_key, place < keys, place < width)[None]
    return _Columns(row, tile, head, start + place, place, real, groups)


def _read_parts(
    at: _Columns, position: Array, mixed: Any, kernel: Any, ids: Any, before: Any = None
) -> tuple[list[Array], list[Array]]:
    """The convolution's inputs `[positions, columns]` at each of its places, and the weights."""
    (_, length, _), behind = mixed.shape, kernel.shape[1] - 1
    inside, own = position < length, _read_ids(ids, at.row, position)
    inputs, weights = [], []
    for back in range(behind, -1, -1):
        since = position - back
        known = inside & (since >= 0) & (_read_ids(ids, at.row, since) == own)
        x = plgpu.load(
            mixed.at[at.row, jnp.maximum(since, 0)[:, None], at.column[None]],
            mask=known[:, None] & at.real,
            other=0.0,
        )
        if before is not None and back:
            known = inside & (since < 0) & (_read_ids(ids, at.row, 0 * position) == own)
            x += plgpu.load(
                before.at[at.row, jnp.minimum(since, -1)[:, None] + behind, at.column[None]],
                mask=known[:, None] & at.real,
                other=0.0,
            ).astype(x.dtype)
        inputs.append(x)
        weights.append(_read_weight(at, kernel, behind - back))
    return inputs, weights


def _read_ids(ids: Any, row: Array, position: Array) -> Array:
    return plgpu.load(ids.at[row, jnp.clip(position, 0, ids.shape[1] - 1)])


def _read_weight(at: _Columns, kernel: Any, place: int) -> Array:
    real = None if at.real is True else at.real[0]
    other = None if real is None else 0.0
    weight = plgpu.load(kernel.at[at.column, jnp.int32(place)], mask=real, other=other)
    return weight.astype(jnp.float32)[None]


def _convolve(inputs: list[Array], weights: list[Array], dtype: Any) -> tuple[Array, Array]:
    """The sum, and silu of it, rounded."""
    total = jnp.zeros(inputs[0].shape, jnp.float32)
    for x, weight in zip(inputs, weights, strict=True):
        total += x.astype(jnp.float32) * weight
    return total, (total * jax.nn.sigmoid(total)).astype(dtype).astype(jnp.float32)


def _measure(at: _Columns, keys: int, made: Array) -> tuple[Array, Array]:
    """Rows' inverse lengths, 1 of values; and what queries are scaled by besides."""
    lengths = jax.lax.rsqrt(jnp.sum(made * made, axis=1) + 1e-6)[:, None]
    one = jnp.ones_like(lengths)
    return at.choose(lengths, lengths, one), at.choose(keys**-0.5 * one, one, one)


def _measure_back(at: _Columns, keys: int, made: Array, given: Array) -> Array:
    """The gradient of what has been made, by that of its scaled unit vectors."""
    factor, scale = _measure(at, keys, made)
    along = factor * factor * jnp.sum(given * made, axis=1)[:, None]
    return (factor * scale) * given - (factor * scale * along) * made


def make_heads(
    mixed: Float[Array, "B T X"],
    kernel: Float[Array, "E W"],
    segment_ids: Int[Array, "B T"],
    groups: int,
    key_dim: int,
    heads: int,
    before: Float[Array, "B W1 E"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G K"], Float[Array, "B T H V"]]:
    """Queries, keys and values of `delta.make_heads`, in mixed's dtype; it is read once.

    With `before` it has no gradient.
    """
    sizes = groups, key_dim, heads, (kernel.shape[0] - 2 * groups * key_dim) // heads
    if before is None:
        found: Any = _make_heads(mixed, kernel, segment_ids, sizes, interpret)
        return found
    return _run_heads(mixed, kernel, segment_ids, sizes, interpret, before)


def _run_heads(mixed, kernel, segment_ids, sizes, interpret, *before) -> Any:
    (groups, keys, heads, width), (rows, length, _) = sizes, mixed.shape
    shapes = (groups, keys), (groups, keys), (heads, width)
    return pl.pallas_call(
        functools.partial(_say_heads, sizes, bool(before)),
        grid=(rows, pl.cdiv(length, _HEAD_ROWS), 2 * groups + heads),
        out_shape=tuple(
            jax.ShapeDtypeStruct((rows, length, *shape), mixed.dtype) for shape in shapes
        ),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(mixed, kernel, segment_ids, *before)


_make_heads = jax.custom_vjp(_run_heads, nondiff_argnums=(3, 4))


def _say_heads(sizes, goes_on, mixed, kernel, ids, *refs):
    before, outs = (refs[0] if goes_on else None), refs[goes_on:]
    groups, keys, _, width = sizes
    at = _find_columns(groups, keys, width)
    position = at.tile * _HEAD_ROWS + _count(_HEAD_ROWS)
    parts = _read_parts(at, position, mixed, kernel, ids, before)
    _, made = _convolve(*parts, mixed.dtype)
    factor, scale = _measure(at, keys, made)
    said = (made * factor * scale).astype(mixed.dtype)
    for to, mine in at.parts(outs, position):
        plgpu.store(to, said, mask=(position < mixed.shape[1])[:, None] & mine)


def _heads_forward(mixed, kernel, segment_ids, sizes, interpret) -> Any:
    return _run_heads(mixed, kernel, segment_ids, sizes, interpret), (mixed, kernel, segment_ids)


def _heads_backward(sizes: Any, interpret: bool, residuals: Any, gradients: Any) -> Any:
    """Gradients by the sum of each position first, which its W inputs then share."""
    mixed, kernel, ids = residuals
    (groups, _, heads, _), (rows, length, _), columns = sizes, mixed.shape, kernel.shape[0]
    spans = pl.cdiv(length, _BACK_SPAN)
    like = jax.ShapeDtypeStruct((rows, length, columns), mixed.dtype)

    def run(body: Any, tiles: int, outs: Any, *inputs: Any) -> Any:
        return pl.pallas_call(
            functools.partial(body, sizes),
            grid=(rows, tiles, 2 * groups + heads),
            out_shape=outs,
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
        )(*inputs)

    of_kernel = (rows, spans, kernel.shape[1], columns), jnp.float32
    outs = like, jax.ShapeDtypeStruct(*of_kernel)
    of_sums, of_kernel = run(_sum_back, spans, outs, mixed, kernel, ids, *gradients)
    tiles = pl.cdiv(length, _HEAD_ROWS)
    (of_mixed,) = run(_spread_back, tiles, (like,), of_sums, kernel, ids)
    of_mixed = jnp.pad(of_mixed, ((0, 0), (0, 0), (0, mixed.shape[2] - columns)))
    return of_mixed, jnp.sum(of_kernel, axis=(0, 1)).T.astype(kernel.dtype), None


def _sum_back(sizes, mixed, kernel, ids, of_q, of_k, of_v, of_sums, of_kernel):
    """Gradients of the sums at a span of positions, and of the weights by these."""
    groups, keys, _, width = sizes
    at, length = _find_columns(groups, keys, width), mixed.shape[1]

    def add(step, totals):
        position = at.tile * _BACK_SPAN + step * _BACK_ROWS + _count(_BACK_ROWS)
        inside = (position < length)[:, None]
        inputs, weights = _read_parts(at, position, mixed, kernel, ids)
        total, made = _convolve(inputs, weights, mixed.dtype)
        given = at.load((of_q, of_k, of_v), position, inside).astype(jnp.float32)
        given = jax.lax.cond(
            at.head < 2 * groups, lambda: _measure_back(at, keys, made, given), lambda: given
        )
        gate = jax.nn.sigmoid(total)
        given *= gate * (1 + total * (1 - gate))
        to = of_sums.at[at.row, position[:, None], at.column[None]]
        plgpu.store(to, given.astype(of_sums.dtype), mask=inside & at.real)
        pairs = zip(totals, inputs, strict=True)
        return tuple(sums + given * x.astype(jnp.float32) for sums, x in pairs)

    zero = jnp.zeros((_BACK_ROWS, at.place.shape[0]), jnp.float32)
    count = kernel.shape[1]
    totals = jax.lax.fori_loop(0, _BACK_SPAN // _BACK_ROWS, add, (zero,) * count)
    real = None if at.real is True else at.real[0]
    for place, sums in enumerate(totals):
        to = of_kernel.at[at.row, at.tile, jnp.int32(place), at.column]
        plgpu.store(to, jnp.sum(sums, axis=0), mask=real)


def _spread_back(sizes, of_sums, kernel, ids, of_mixed):
    """Gradients of inputs: of the sums at their own and the next positions of the document."""
    groups, keys, _, width = sizes
    at, behind, length = _find_columns(groups, keys, width), kernel.shape[1] - 1, ids.shape[1]
    position = at.tile * _HEAD_ROWS + _count(_HEAD_ROWS)
    own = _read_ids(ids, at.row, position)
    total = jnp.zeros((_HEAD_ROWS, at.place.shape[0]), jnp.float32)
    for back in range(behind + 1):
        later = position + back
        known = (later < length) & (_read_ids(ids, at.row, later) == own)
        x = plgpu.load(
            of_sums.at[at.row, later[:, None], at.column[None]],
            mask=known[:, None] & at.real,
            other=0.0,
        )
        total += x.astype(jnp.float32) * _read_weight(at, kernel, behind - back)
    to = of_mixed.at[at.row, position[:, None], at.column[None]]
    inside = (position < length)[:, None] & at.real
    plgpu.store(to, total.astype(of_mixed.dtype), mask=inside)


_make_heads.defvjp(_heads_forward, _heads_backward)
