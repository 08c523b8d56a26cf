"""Triton kernels of the gated delta rule, beside its definition in `models.delta`.

`apply_delta_rule` reads queries, keys and values where they lie. Three kernels go forward: of each
chunk what it teaches, for all chunks at once; the states, a chunk after the other; the outputs.
Three go back, which keep the inverses, the states before chunks and the news, and make the rest
again. `make_heads` is the convolution and what follows it up to the rule.

Letters are those of `models.delta`; P is B H, one state each.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int

from kdjax.models.kernels import plgpu

# Warps of a program: of a chunk forward, of its outputs, of both kernels of its gradients.
_CHUNK_WARPS, _OUT_WARPS, _NEWS_WARPS, _BACK_WARPS = 4, 4, 4, 8
# Columns of a state that one program passes on, and its warps; and of one that makes outputs too.
_STATE_COLUMNS, _STATE_WARPS = 64, 4
_ALL_COLUMNS, _ALL_WARPS = 128, 8
_STAGES = 2  # chunks that both have loaded at once


class _Fades(NamedTuple):
    """Shares that a chunk's positions keep of each other and of the state before them."""

    beta: Array  # [C]
    faded: Array  # [C, C], 0 of what is later or of another document
    carried: Array  # [C], of the state before
    to_end: Array  # [C], of a position at the chunk's end
    stays: Array  # of the state before, at the chunk's end


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

    def part(self, ref: Any) -> Any:
        """The chunk's matrix of `[N, P, rows, columns]`."""
        rows, columns = (_count(n) for n in ref.shape[2:])
        return ref.at[self.number, self.state, rows[:, None], columns[None]]


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
    upto = position[:, None] >= position[None]
    # Differences of sums of 1,000 are 6e-5 off in float32, which bfloat16 (4e-3) does not see.
    since = jnp.sum(jnp.where(upto, fade[None], 0.0), axis=1)
    whole = jnp.sum(fade)
    known = upto & (own[:, None] == own[None])
    # Masked before exp: of what is to come it would overflow.
    gaps = jnp.where(known, since[:, None] - since[None], 0.0)
    return _Fades(
        share,
        jnp.where(known, jnp.exp(gaps), 0.0),
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


def _run(
    kernel: Any,
    sizes: tuple[int, int],
    shape: Any,
    groups: int,
    outs: Any,
    warps: int,
    *inputs: Any,
) -> Any:
    """Runs a program a chunk of each head of values `[B, T, H, V]` of this shape."""
    (size, _), (rows, length, heads, _) = sizes, shape
    return pl.pallas_call(
        functools.partial(kernel, functools.partial(_find_place, size, length, groups)),
        grid=(rows, pl.cdiv(length, size), heads),
        out_shape=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
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
    """Outputs and last states; and, to `keep`: inverses, states before chunks, news.

    Without, outputs are made as the states pass, which are then not written.
    """
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    (rows, length, heads, width), chunk = shape, (size, interpret)
    lead = pl.cdiv(length, size), rows * heads
    outs = [(lead, jnp.float32), *[((*lead, size), jnp.float32)] * 2]
    outs += [((*lead, size, n), dtype) for n in (width, keys, size)]
    stays, carried, to_end, fresh, seen, pairs = _run(
        functools.partial(_teach, keep), chunk, shape, groups, outs, _CHUNK_WARPS, *rule
    )
    first = state.reshape(-1, *state.shape[2:])
    if keep:
        before = jax.ShapeDtypeStruct((*lead, keys, width), dtype)
        inputs, outs = (fresh, seen, rule.k, to_end, stays, first), (first, before, fresh)
        last, before, news = _run_states(_pass_states, heads, inputs, outs, interpret, 2)
        kept = pairs, stays, to_end, before, news
        inputs, outs = (rule.q, rule.k, *rule[3:], before, news), [(shape, dtype)]
        (out,) = _run(_say, chunk, shape, groups, outs, _OUT_WARPS, *inputs)
    else:
        inputs = fresh, seen, rule.k, to_end, stays, rule.q, carried, pairs, first
        last, out = _run_states(_pass_and_say, heads, inputs, (first, rule.v), interpret)
        kept = None
    return (out, last.reshape(state.shape)), kept


def _teach(keep, find, q, k, v, decay, beta, ids, stays, carried, to_end, fresh, seen, pairs):
    """Makes what a chunk teaches: `fresh` less `seen` times the state before it.

    `pairs` is how positions mix, inverted, to `keep`, else what queries read of positions.
    """
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    keys = place.load(k, place.group)
    mixing = _mix(place, fades) * plgpu.dot(keys, keys, trans_b=True)
    solve = invert_blocks(mixing, functools.partial(plgpu.dot, allow_tf32=True)).astype(keys.dtype)
    values = _scale(place.load(v, place.head), fades.beta)
    plgpu.store(place.part(fresh), plgpu.dot(solve, values).astype(fresh.dtype))
    known = _scale(keys, fades.beta * fades.carried)
    plgpu.store(place.part(seen), plgpu.dot(solve, known).astype(seen.dtype))
    reads = solve if keep else _read(place.load(q, place.group), keys, fades)
    plgpu.store(place.part(pairs), reads)
    at = place.number, place.state
    plgpu.store(stays.at[at], fades.stays)
    for ref, share in ((carried, fades.carried), (to_end, fades.to_end)):
        plgpu.store(ref.at[*at, _count(ref.shape[2])], share)


def _read(queries: Array, keys: Array, fades: _Fades) -> Array:
    """Shares of a chunk's news that its queries read."""
    return (plgpu.dot(queries, keys, trans_b=True) * fades.faded).astype(keys.dtype)


def _mix(place: _Place, fades: _Fades) -> Array:
    """beta * faded of what is earlier."""
    below = place.position[:, None] > place.position[None]
    return jnp.where(below, fades.beta[:, None] * fades.faded, 0.0)


def _say(find, q, k, decay, beta, ids, before, news, out):
    """Tells queries what the state before the chunk says, and its own positions."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    reads = _read(queries, keys, fades)
    said = fades.carried[:, None] * plgpu.dot(queries, plgpu.load(place.part(before)))
    place.store(out, said + plgpu.dot(reads, plgpu.load(place.part(news))))


def _run_states(
    kernel: Any, heads: int, inputs: Any, outs: Any, interpret: bool, place: int | None = None
) -> Any:
    """Runs a program a part of each state; the first input lies where output `place` will."""
    states, _, width = inputs[-1].shape
    columns, warps = (_STATE_COLUMNS, _STATE_WARPS) if place else (_ALL_COLUMNS, _ALL_WARPS)
    columns = min(columns, width)
    return pl.pallas_call(
        functools.partial(kernel, inputs[0].shape[0], columns, heads),
        grid=(states, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        input_output_aliases={} if place is None else {0: place},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=_STAGES),
        interpret=interpret,
    )(*inputs)


class _Part(NamedTuple):
    """A part of a state that one program passes on: some columns of values."""

    state: Array  # among P
    row: Array
    head: Array
    position: Array  # [C, 1]
    key: Array  # [K]
    column: Array  # [1, columns]

    def load_keys(self, k: Any, n: Array) -> Array:
        """Chunk n of the keys or queries of the state's head, zeros beyond the row."""
        position = n * self.position.shape[0] + self.position
        at = k.at[self.row, position, self.head % k.shape[2], self.key[None]]
        return plgpu.load(at, mask=position < k.shape[1], other=0.0)

    def load_shares(self, shares: Any, n: Array) -> Array:
        """Numbers `[C, 1]` of the positions of chunk n."""
        return plgpu.load(shares.at[n, self.state, _count(shares.shape[2])])[:, None]


def _find_part(columns: int, heads: int, size: int, keys: int) -> _Part:
    state = pl.program_id(0)
    column = pl.program_id(1) * columns + _count(columns)
    position = _count(size)[:, None]
    return _Part(state, state // heads, state % heads, position, _count(keys), column[None])


def _pass(at: _Part, refs: Any, n: Array, state: Array, half: Array, news: Any = None) -> Any:
    """The state behind chunk n, and its news: `fresh` less what the state says of `seen`."""
    fresh, seen, k, to_end, stays = refs
    known = plgpu.dot(plgpu.load(seen.at[n, at.state, at.position, at.key[None]]), half)
    new = plgpu.load(fresh.at[n, at.state, at.position, at.column]).astype(jnp.float32) - known
    if news is not None:
        plgpu.store(news.at[n, at.state, at.position, at.column], new.astype(news.dtype))
    left = (at.load_shares(to_end, n) * new).astype(half.dtype)
    learnt = plgpu.dot(at.load_keys(k, n), left, trans_a=True)
    return state * plgpu.load(stays.at[n, at.state]) + learnt, new.astype(half.dtype)


def _pass_states(count: int, columns: int, heads: int, *refs):
    """The states before each chunk, and its news."""
    (*given, state), (last, before, news) = refs[:-3], refs[-3:]
    at = _find_part(columns, heads, news.shape[2], state.shape[1])
    of_key = at.key[:, None]

    def turn(n, s):
        half = s.astype(before.dtype)
        plgpu.store(before.at[n, at.state, of_key, at.column], half)
        return _pass(at, given, n, s, half, news)[0]

    first = plgpu.load(state.at[at.state, of_key, at.column])
    plgpu.store(last.at[at.state, of_key, at.column], jax.lax.fori_loop(0, count, turn, first))


def _pass_and_say(count: int, columns: int, heads: int, *refs):
    """`_pass_states` and `_say` in one."""
    (*given, q, carried, reads, state), (last, out) = refs[:-2], refs[-2:]
    at = _find_part(columns, heads, reads.shape[2], state.shape[1])
    of_key, size = at.key[:, None], reads.shape[2]

    def turn(n, s):
        half = s.astype(out.dtype)
        said = at.load_shares(carried, n) * plgpu.dot(at.load_keys(q, n), half)
        s, new = _pass(at, given, n, s, half)
        pairs = plgpu.load(reads.at[n, at.state, at.position, at.position.reshape(1, size)])
        said += plgpu.dot(pairs, new)
        position = n * size + at.position
        to = out.at[at.row, position, at.head, at.column]
        plgpu.store(to, said.astype(out.dtype), mask=position < out.shape[1])
        return s

    first = plgpu.load(state.at[at.state, of_key, at.column])
    plgpu.store(last.at[at.state, of_key, at.column], jax.lax.fori_loop(0, count, turn, first))


def _pass_gradients(
    count: int, columns: int, heads: int, of_news, of_before, seen, k, to_end, stays, last, *outs
):
    """From the last chunk to the first: the gradient of the state, that behind each chunk."""
    first, after, fresh = outs
    at = _find_part(columns, heads, of_news.shape[2], k.shape[3])
    of_key = at.key[:, None]

    def turn(i, g):
        n, half = count - 1 - i, g.astype(after.dtype)
        plgpu.store(after.at[n, at.state, of_key, at.column], half)
        new = plgpu.load(of_news.at[n, at.state, at.position, at.column]).astype(jnp.float32)
        new += at.load_shares(to_end, n) * plgpu.dot(at.load_keys(k, n), half)
        new = new.astype(fresh.dtype)
        plgpu.store(fresh.at[n, at.state, at.position, at.column], new)
        g = g * plgpu.load(stays.at[n, at.state])
        g += plgpu.load(of_before.at[n, at.state, of_key, at.column]).astype(jnp.float32)
        known = plgpu.load(seen.at[n, at.state, at.position, at.key[None]])
        return g - plgpu.dot(known, new, trans_a=True)

    start = plgpu.load(last.at[at.state, of_key, at.column])
    plgpu.store(first.at[at.state, of_key, at.column], jax.lax.fori_loop(0, count, turn, start))


def _go_back(size: int, interpret: bool, residuals: Any, gradients: Any) -> Any:
    rule, (inverse, stays, to_end, before, news) = residuals
    of_out, of_last = gradients
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    chunk, lead, width = (size, interpret), news.shape[:2], shape[3]
    parts = (size, width), (keys, width), (size, keys)
    of_news, of_before, seen = _run(
        _ask_back,
        chunk,
        shape,
        groups,
        [((*lead, *part), dtype) for part in parts],
        _NEWS_WARPS,
        *(rule.q, rule.k, *rule[3:], inverse, of_out),
    )
    last = of_last.reshape(-1, keys, width)
    first, after, fresh = _run_states(
        _pass_gradients,
        shape[2],
        (of_news, of_before, seen, rule.k, to_end, stays, last),
        (last, of_before, of_news),
        interpret,
        2,
    )
    of_key, of_one = ((*shape[:3], keys), dtype), (shape[:3], jnp.float32)
    of_q, of_k, of_v, of_decay, of_beta = _run(
        _teach_back,
        chunk,
        shape,
        groups,
        [of_key, of_key, (shape, dtype), of_one, of_one],
        _BACK_WARPS,
        *(*rule, inverse, before, after, news, fresh, of_out),
    )
    if shape[2] > groups:  # of all value heads that read a key head
        split = *shape[:2], -1, groups, keys
        of_q, of_k = (
            jnp.sum(x.reshape(split).astype(jnp.float32), axis=2).astype(dtype)
            for x in (of_q, of_k)
        )
    return of_q, of_k, of_v, of_decay, of_beta, None, first.reshape(of_last.shape)


def _ask_back(find, q, k, decay, beta, ids, inverse, of_out, of_news, of_before, seen):
    """Gradients of `_say` that the states wait for; what the states read, made again."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    asked = place.load(of_out, place.head)
    reads = _read(queries, keys, fades)
    plgpu.store(place.part(of_news), plgpu.dot(reads, asked, trans_a=True).astype(of_news.dtype))
    carried = _scale(queries, fades.carried)
    plgpu.store(
        place.part(of_before), plgpu.dot(carried, asked, trans_a=True).astype(of_before.dtype)
    )
    known = _scale(keys, fades.beta * fades.carried)
    solve = plgpu.load(place.part(inverse))
    plgpu.store(place.part(seen), plgpu.dot(solve, known).astype(seen.dtype))


def _teach_back(
    find, q, k, v, decay, beta, ids, inverse, before, after, news, fresh, of_out, *outs
):
    """Gradients of a chunk's inputs by those of its news (`fresh`) and of the state behind it.

    (I + M) news = w - u S, with w = beta v, u = beta carried k. Where y is (I + M)^-T times the
    gradient of news, that of w is y, that of u is -y S^T, that of M is -y news^T.
    """
    of_q, of_k, of_v, of_decay, of_beta = outs
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    asked, taught = place.load(of_out, place.head), plgpu.load(place.part(news))
    given = plgpu.dot(plgpu.load(place.part(inverse)), plgpu.load(place.part(fresh)), trans_a=True)
    place.store(of_v, fades.beta[:, None] * given)
    values = place.load(v, place.head).astype(jnp.float32)
    of_share = jnp.sum(given * values, axis=1)
    given = given.astype(taught.dtype)

    # Pairs of positions: what mixes them, and what queries read of them.
    queries, keys = (place.load(x, place.group) for x in (q, k))
    below = place.position[:, None] > place.position[None]
    mixed = -jnp.where(below, fades.faded, 0.0) * plgpu.dot(given, taught, trans_b=True)
    grown = mixed * plgpu.dot(keys, keys, trans_b=True)
    of_share += jnp.sum(grown, axis=1)
    mixed = (fades.beta[:, None] * mixed).astype(keys.dtype)
    read = fades.faded * plgpu.dot(asked, taught, trans_b=True)
    moved = fades.beta[:, None] * grown + read * plgpu.dot(queries, keys, trans_b=True)
    of_since = jnp.sum(moved, axis=1) - jnp.sum(moved, axis=0)
    read = read.astype(keys.dtype)

    state = plgpu.load(place.part(before))
    told = plgpu.dot(asked, state, trans_b=True)
    of_carried = jnp.sum(told * queries.astype(jnp.float32), axis=1)
    place.store(of_q, fades.carried[:, None] * told + plgpu.dot(read, keys))
    made = plgpu.dot(read, queries, trans_a=True)
    made += plgpu.dot(mixed, keys) + plgpu.dot(mixed, keys, trans_a=True)
    exact = keys.astype(jnp.float32)
    known = -plgpu.dot(given, state, trans_b=True)
    share = jnp.sum(known * exact, axis=1)
    of_share += fades.carried * share
    of_carried += fades.beta * share
    made += (fades.beta * fades.carried)[:, None] * known
    behind = plgpu.load(place.part(after))
    kept = plgpu.dot(taught, behind, trans_b=True)
    of_end = fades.to_end * jnp.sum(kept * exact, axis=1)
    place.store(of_k, made + fades.to_end[:, None] * kept)

    of_whole = fades.stays * jnp.sum(behind.astype(jnp.float32) * state.astype(jnp.float32))
    of_since += fades.carried * of_carried - of_end
    of_fade = jnp.sum(jnp.where(~below, of_since[None], 0.0), axis=1)
    of_fade += of_whole + jnp.sum(of_end)
    for ref, value in ((of_decay, of_fade), (of_beta, of_share)):
        at = ref.at[place.row, place.position, place.head]
        plgpu.store(at, value, mask=place.inside)


def _rule_forward(q, k, v, decay, beta, segment_ids, state, size, interpret) -> Any:
    rule = _Rule(q, k, v, decay, beta, segment_ids)
    found, kept = _go_forward(rule, state, size, interpret, keep=True)
    return found, (rule, kept)


apply_delta_rule.defvjp(_rule_forward, _go_back)


# Positions and warps of a program that makes heads; positions that one going back adds up, as many
# at a time.
_HEAD_ROWS, _HEAD_WARPS = 32, 4
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
        compiler_params=plgpu.CompilerParams(num_warps=_HEAD_WARPS, num_stages=1),
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
            compiler_params=plgpu.CompilerParams(num_warps=_HEAD_WARPS, num_stages=1),
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
        factor, scale = _measure(at, keys, made)
        given = jnp.zeros(made.shape, jnp.float32)
        for place, mine in at.parts((of_q, of_k, of_v), position):
            given += plgpu.load(place, mask=inside & mine, other=0.0).astype(jnp.float32)
        given *= scale
        unit = made * factor
        along = jnp.sum(given * unit, axis=1)[:, None]
        given = factor * (given - at.choose(unit, unit, 0.0) * along)
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
