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
_STATE_COLUMNS, _STATE_WARPS = 64, 4  # of a state that one program passes on, and its warps


class _Fades(NamedTuple):
    """What a chunk's positions keep of each other and of the state before them."""

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
        """As `load`, of the value head."""
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


def _dot(a: Array, b: Array, **turned: bool) -> Array:
    return plgpu.dot(a, b, **turned)


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
    kernel: Any, sizes: tuple[int, int], shape: Any, groups: int, outs: Any, warps: int, *inputs: Any
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
    """Outputs and last states; and, to `keep`: inverses, states before chunks, news."""
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    (rows, length, heads, width), chunk = shape, (size, interpret)
    lead = pl.cdiv(length, size), rows * heads
    columns = [width, keys, keys, *((size,) if keep else ())]
    outs = [((*lead, size, n), dtype) for n in columns]
    stays = lead, jnp.float32
    inputs = rule.k, rule.v, *rule[3:]
    stays, fresh, seen, kept, *inverse = _run(
        _teach, chunk, shape, groups, [stays, *outs], _CHUNK_WARPS, *inputs
    )
    first = state.reshape(-1, *state.shape[2:])
    before = jax.ShapeDtypeStruct((*lead, keys, width), dtype)
    last, before, news = _run_states(
        _pass_states, (fresh, seen, kept, stays, first), (first, before, fresh), interpret
    )
    inputs = rule.q, rule.k, *rule[3:], before, news
    (out,) = _run(_say, chunk, shape, groups, [(shape, dtype)], _OUT_WARPS, *inputs)
    return (out, last.reshape(state.shape)), (*inverse, stays, before, news)


def _teach(find, k, v, decay, beta, ids, stays, fresh, seen, kept, *inverse):
    """What a chunk teaches: `fresh` less `seen` times the state before it, at `kept`."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    keys = place.load(k, place.group)
    mixing = _mix(place, fades) * _dot(keys, keys, trans_b=True)
    solve = invert_blocks(mixing, functools.partial(_dot, allow_tf32=True)).astype(keys.dtype)
    for ref in inverse:
        plgpu.store(place.part(ref), solve)
    values = _scale(place.load(v, place.head), fades.beta)
    plgpu.store(place.part(fresh), _dot(solve, values).astype(fresh.dtype))
    known = _scale(keys, fades.beta * fades.carried)
    plgpu.store(place.part(seen), _dot(solve, known).astype(seen.dtype))
    plgpu.store(place.part(kept), _scale(keys, fades.to_end))
    plgpu.store(stays.at[place.number, place.state], fades.stays)


def _mix(place: _Place, fades: _Fades) -> Array:
    """beta * faded of what is earlier."""
    below = place.position[:, None] > place.position[None]
    return jnp.where(below, fades.beta[:, None] * fades.faded, 0.0)


def _say(find, q, k, decay, beta, ids, before, news, out):
    """What queries are told by the state before the chunk, and by its own positions."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    reads = (_dot(queries, keys, trans_b=True) * fades.faded).astype(keys.dtype)
    said = fades.carried[:, None] * _dot(queries, plgpu.load(place.part(before)))
    place.store(out, said + _dot(reads, plgpu.load(place.part(news))))


def _run_states(kernel: Any, inputs: Any, outs: Any, interpret: bool) -> Any:
    heads, _, width = inputs[-1].shape
    columns = min(_STATE_COLUMNS, width)
    return pl.pallas_call(
        functools.partial(kernel, inputs[0].shape[0], columns),
        grid=(heads, width // columns),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs),
        compiler_params=plgpu.CompilerParams(num_warps=_STATE_WARPS, num_stages=2),
        interpret=interpret,
    )(*inputs)


def _state_places(columns: int, fresh: Any, state: Any) -> tuple[Array, Array, Array]:
    """Places of a chunk's positions, of keys, and of the columns of values of a program's part."""
    positions, keys = (jnp.arange(ref.shape[-2], dtype=jnp.int32) for ref in (fresh, state))
    part = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    return positions[:, None], keys, part[None]


def _pass_states(count: int, columns: int, fresh, seen, kept, stays, state, last, before, news):
    head = pl.program_id(0)
    row, keys, part = _state_places(columns, fresh, state)
    of_key, key = keys[:, None], keys[None]

    def turn(n, s):
        half = s.astype(before.dtype)
        plgpu.store(before.at[n, head, of_key, part], half)
        known = plgpu.dot(plgpu.load(seen.at[n, head, row, key]), half)
        new = plgpu.load(fresh.at[n, head, row, part]).astype(jnp.float32) - known
        new = new.astype(news.dtype)
        plgpu.store(news.at[n, head, row, part], new)
        learnt = plgpu.dot(plgpu.load(kept.at[n, head, row, key]), new, trans_a=True)
        return s * plgpu.load(stays.at[n, head]) + learnt

    first = plgpu.load(state.at[head, of_key, part])
    plgpu.store(last.at[head, of_key, part], jax.lax.fori_loop(0, count, turn, first))


def _pass_gradients(
    count: int, columns: int, of_news, of_before, seen, kept, stays, last, first, after, fresh
):
    """From the last chunk to the first: the gradient of the state, that behind each chunk."""
    head = pl.program_id(0)
    row, keys, part = _state_places(columns, of_news, last)
    of_key, key = keys[:, None], keys[None]

    def turn(i, g):
        n, half = count - 1 - i, g.astype(after.dtype)
        plgpu.store(after.at[n, head, of_key, part], half)
        new = plgpu.load(of_news.at[n, head, row, part]).astype(jnp.float32)
        new += plgpu.dot(plgpu.load(kept.at[n, head, row, key]), half)
        new = new.astype(fresh.dtype)
        plgpu.store(fresh.at[n, head, row, part], new)
        g = g * plgpu.load(stays.at[n, head])
        g += plgpu.load(of_before.at[n, head, of_key, part]).astype(jnp.float32)
        return g - plgpu.dot(plgpu.load(seen.at[n, head, row, key]), new, trans_a=True)

    start = plgpu.load(last.at[head, of_key, part])
    plgpu.store(first.at[head, of_key, part], jax.lax.fori_loop(0, count, turn, start))


def _go_back(size: int, interpret: bool, residuals: Any, gradients: Any) -> Any:
    rule, (inverse, stays, before, news) = residuals
    of_out, of_last = gradients
    shape, dtype, groups, keys = rule.v.shape, rule.v.dtype, rule.k.shape[2], rule.k.shape[3]
    chunk, lead, width = (size, interpret), news.shape[:2], shape[3]
    parts = (size, width), (keys, width), (size, keys), (size, keys)
    of_news, of_before, seen, kept = _run(
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
        (of_news, of_before, seen, kept, stays, last),
        (last, of_before, of_news),
        interpret,
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


def _ask_back(find, q, k, decay, beta, ids, inverse, of_out, of_news, of_before, seen, kept):
    """Gradients of `_say` that the states wait for; what the states read, made again."""
    place = find()
    fades = _read_fades(place, decay, beta, ids)
    queries, keys = (place.load(x, place.group) for x in (q, k))
    asked = place.load(of_out, place.head)
    reads = (_dot(queries, keys, trans_b=True) * fades.faded).astype(keys.dtype)
    plgpu.store(place.part(of_news), _dot(reads, asked, trans_a=True).astype(of_news.dtype))
    carried = _scale(queries, fades.carried)
    plgpu.store(place.part(of_before), _dot(carried, asked, trans_a=True).astype(of_before.dtype))
    known = _scale(keys, fades.beta * fades.carried)
    solve = plgpu.load(place.part(inverse))
    plgpu.store(place.part(seen), _dot(solve, known).astype(seen.dtype))
    plgpu.store(place.part(kept), _scale(keys, fades.to_end))


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
    given = _dot(plgpu.load(place.part(inverse)), plgpu.load(place.part(fresh)), trans_a=True)
    place.store(of_v, fades.beta[:, None] * given)
    values = place.load(v, place.head).astype(jnp.float32)
    of_share = jnp.sum(given * values, axis=1)
    given = given.astype(taught.dtype)

    # Pairs of positions: what mixes them, and what queries read of them.
    queries, keys = (place.load(x, place.group) for x in (q, k))
    below = place.position[:, None] > place.position[None]
    mixed = -jnp.where(below, fades.faded, 0.0) * _dot(given, taught, trans_b=True)
    grown = mixed * _dot(keys, keys, trans_b=True)
    of_share += jnp.sum(grown, axis=1)
    mixed = (fades.beta[:, None] * mixed).astype(keys.dtype)
    read = fades.faded * _dot(asked, taught, trans_b=True)
    moved = fades.beta[:, None] * grown + read * _dot(queries, keys, trans_b=True)
    of_since = jnp.sum(moved, axis=1) - jnp.sum(moved, axis=0)
    read = read.astype(keys.dtype)

    state = plgpu.load(place.part(before))
    told = _dot(asked, state, trans_b=True)
    of_carried = jnp.sum(told * queries.astype(jnp.float32), axis=1)
    place.store(of_q, fades.carried[:, None] * told + _dot(read, keys))
    made = _dot(read, queries, trans_a=True)
    made += _dot(mixed, keys) + _dot(mixed, keys, trans_a=True)
    exact = keys.astype(jnp.float32)
    known = -_dot(given, state, trans_b=True)
    share = jnp.sum(known * exact, axis=1)
    of_share += fades.carried * share
    of_carried += fades.beta * share
    made += (fades.beta * fades.carried)[:, None] * known
    behind = plgpu.load(place.part(after))
    kept = _dot(taught, behind, trans_b=True)
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
