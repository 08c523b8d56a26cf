"""The gated delta rule: each head has a state in place of keys and values.

At each position the state S `[K, V]` first decays, then is corrected towards the value of the key,
and is read by the query (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464):

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

`recur` computes this definition, one position at a time; `apply_delta_rule` computes it by products
of chunks of positions. Both reset the state at each document of a row.

Letters: B rows, T positions, N chunks, C positions in a chunk, G heads of queries and keys, R value
heads for each key head, H = R G value heads, K key width, V value width. Value head h reads key
head h mod G, which is the order of GGUF files.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from kdjax.models.kernels import convolution, delta_rule, recurrent
from kdjax.models.kernels.delta_rule import states_fit

CHUNK = 64
_FEW = 16  # up to this many positions `recur` is faster than a chunk


class DeltaInputs(NamedTuple):
    """Inputs of a layer's states, which its linears make of its rows."""

    mixed: Float[
        Array, "B T X"
    ]  # columns of queries, keys, values, then others; before the convolution
    kernel: Float32[Array, "E W"]  # of the convolution
    decay: Float32[Array, "B T H"]
    beta: Float32[Array, "B T H"]


class Stacked(NamedTuple):
    """States of several layers, of which one is read and updated; the full stack is returned."""

    states: Float32[Array, "L B H K V"]
    layer: Int[Array, ""]


class Late(NamedTuple):
    """Updates by positions read since the states were written, at most S of each row."""

    news: recurrent.PendingUpdates
    place: Int[Array, ""]  # index of the next position's update
    alive: Bool[Array, " B"]  # rows that read it; the others' updates are dropped


def read_states(
    inputs: DeltaInputs,
    groups: int,
    key_dim: int,
    segment_ids: Int[Array, "B T"],
    before: Float[Array, "B W1 E"] | None = None,
    state: Float32[Array, "B H K V"] | Stacked | None = None,
    in_kernels: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "*L B H K V"]]:
    """Outputs of the heads, and the state after the last position.

    With `in_kernels` kernels compute heads and states where `states_fit`, and a few positions
    update a stack in place. `before` and `state` are as in `convolve` and `apply_delta_rule`.
    """
    mixed, heads = inputs.mixed, inputs.beta.shape[2]
    few, width = mixed.shape[1] <= _FEW, inputs.kernel.shape[0] - 2 * groups * key_dim
    fits = in_kernels and states_fit(key_dim, width // heads, mixed.dtype)
    make = convolution.make_heads if fits and not few else make_heads
    q, k, v = make(mixed, inputs.kernel, segment_ids, groups, key_dim, heads, before)
    columns = q, k, v, inputs.decay, inputs.beta, segment_ids
    if not isinstance(state, Stacked):
        return recur(*columns, state) if few else apply_delta_rule(*columns, state, fits)
    if few and fits:
        kept = _fade(inputs.decay, segment_ids)
        return recurrent.fused_recurrent_gated_delta_rule(
            *columns[:3], kept, inputs.beta, state.states, state.layer
        )
    stack, layer = state
    out, state = read_states(inputs, groups, key_dim, segment_ids, before, stack[layer], in_kernels)
    return out, stack.at[layer].set(state)


def read_and_keep(
    inputs: DeltaInputs,
    groups: int,
    key_dim: int,
    segment_ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    before: Float[Array, "B W1 E"] | None = None,
    state: Float32[Array, "B H K V"] | Stacked | None = None,
    in_kernels: bool = False,
) -> tuple[Float[Array, "B T H V"], tuple[Float32[Array, "*L B H K V"], Float[Array, "B W1 E"]]]:
    """`read_states`; returns also what later positions need: state, the convolution's last inputs.

    Both are after the first `lengths` positions: further ones neither decay nor update the state.
    Inputs of earlier documents, or from before the first position, are zeros.
    """
    read = (jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    decay, beta = (jnp.where(read, x, 0.0) for x in (inputs.decay, inputs.beta))
    inputs = inputs._replace(decay=decay, beta=beta)
    out, state = read_states(inputs, groups, key_dim, segment_ids, before, state, in_kernels)
    # Gathered, so that XLA does not copy the inputs of all positions for a few.
    behind = inputs.kernel.shape[1] - 1
    at = lengths[:, None] + jnp.arange(-behind, 0, dtype=jnp.int32)[None]  # negative: in `before`
    place = jnp.maximum(at, 0)
    latest = jnp.take_along_axis(segment_ids, place, axis=1) == segment_ids[:, -1:]
    last = jnp.take_along_axis(inputs.mixed, place[..., None], axis=1)
    last = last[..., : inputs.kernel.shape[0]]
    if before is None:
        earlier = jnp.zeros_like(last)
    else:
        place = jnp.minimum(at, -1) + behind
        earlier = jnp.take_along_axis(before.astype(last.dtype), place[..., None], axis=1)
    last = jnp.where((at >= 0)[..., None], last, earlier)
    return out, (state, jnp.where(latest[..., None], last, 0))


def hold_news(
    states: Array, inputs: Array, groups: int, count: int, interpret: bool = False
) -> Late:
    """Buffers for updates by `count` positions a row of stacks of states and inputs."""
    layers, rows, heads, key_dim, width = states.shape
    sizes = (groups, count, key_dim), (heads, count, width), (heads, count)
    floats = [jax.ShapeDtypeStruct((layers, rows, *size), jnp.float32) for size in sizes]
    mixed = jax.ShapeDtypeStruct((layers, rows, count, inputs.shape[3]), inputs.dtype)
    news = recurrent.allocate_updates([*floats, mixed], interpret)
    return Late(news, jnp.int32(0), jnp.ones((rows,), bool))


def read_late(
    inputs: DeltaInputs, before: Float[Array, "L B W1 E"], stacked: Stacked, late: Late
) -> tuple[Float[Array, "B 1 H V"], Array, Array, Late]:
    """`read_and_keep` for one position a row, by a kernel that writes states every S positions.

    Returns outputs, the stacks of states and of inputs, and the updates that they lack.
    """
    mixed, decay, beta = (x[:, 0] for x in (inputs.mixed, inputs.decay, inputs.beta))
    stacks = before, stacked.states, late.news, stacked.layer, late.place
    out, before, states, news = recurrent.recur_with_pending_updates(
        mixed.astype(before.dtype), inputs.kernel, decay, beta, late.alive, *stacks
    )
    return out[:, None].astype(mixed.dtype), states, before, late._replace(news=news)


def make_heads(
    mixed: Float[Array, "B T X"],
    kernel: Float[Array, "E W"],
    segment_ids: Int[Array, "B T"],
    groups: int,
    key_dim: int,
    heads: int,
    before: Float[Array, "B W1 E"] | None = None,
) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G K"], Float[Array, "B T H V"]]:
    """Queries, scaled, and keys, both of unit length in float32, and values, after `convolve`.

    Only the first E columns of `mixed` are read.
    """
    mixed = convolve(mixed[..., : kernel.shape[0]], kernel, segment_ids, before)
    lead = mixed.shape[:2]
    q, k, v = jnp.split(mixed, [groups * key_dim, 2 * groups * key_dim], axis=-1)
    q, k = (normalize_heads(x.reshape(*lead, groups, key_dim)) for x in (q, k))
    return q * key_dim**-0.5, k, v.reshape(*lead, heads, -1)


def normalize_heads(x: Float[Array, "*B K"]) -> Float32[Array, "*B K"]:
    """x divided by its length, as in Transformers' `l2norm`: 1e-6 is added to the square."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def convolve(
    x: Float[Array, "B T E"],
    weight: Float[Array, "E W"],
    segment_ids: Int[Array, "B T"],
    before: Float[Array, "B W1 E"] | None = None,
) -> Float[Array, "B T E"]:
    """silu of a depthwise causal convolution over the last W positions of a document.

    `before` are the W - 1 inputs before the first position, of its document; None: there are none.
    """
    rows, length, width = x.shape
    behind = weight.shape[1] - 1
    if before is None:
        before, ids = jnp.zeros((rows, behind, width), x.dtype), jnp.full((rows, behind), -1)
    else:
        ids = jnp.broadcast_to(segment_ids[:, :1], (rows, behind))
    x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    ids = jnp.concatenate([ids.astype(segment_ids.dtype), segment_ids], axis=1)
    total = jnp.zeros((rows, length, width), jnp.float32)
    for place in range(behind + 1):
        same = ids[:, place : place + length] == segment_ids
        part = jnp.where(same[..., None], x[:, place : place + length], 0)
        total += part.astype(jnp.float32) * weight[:, place].astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(x.dtype)


def recur(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    segment_ids: Int[Array, "B T"],
    state: Float32[Array, "B H K V"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Computes what `apply_delta_rule` does, one position at a time."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.tile(x.astype(jnp.float32), (1, 1, repeats, 1)) for x in (q, k))
    if state is None:
        state = jnp.zeros((*v.shape[:1], *v.shape[2:3], k.shape[3], v.shape[3]), jnp.float32)
    kept = _fade(decay, segment_ids)

    def step(state: Array, at: Any) -> tuple[Array, Array]:
        q, k, v, kept, beta = at
        state = state * kept[..., None, None]
        known = jnp.einsum("BHKV,BHK->BHV", state, k)
        news = beta[..., None] * (v.astype(jnp.float32) - known)
        state = state + k[..., None] * news[:, :, None]
        return state, jnp.einsum("BHKV,BHK->BHV", state, q)

    inputs = (x.swapaxes(0, 1) for x in (q, k, v, kept, beta))
    state, out = jax.lax.scan(step, state, tuple(inputs))
    return out.swapaxes(0, 1).astype(v.dtype), state


def _fade(
    decay: Float32[Array, "B T H"], segment_ids: Int[Array, "B T"]
) -> Float32[Array, "B T H"]:
    """The factor of the state at each position: 0 at the first of a document."""
    first = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return jnp.where((first == segment_ids)[..., None], jnp.exp(decay), 0.0)


def apply_delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    segment_ids: Int[Array, "B T"],
    state: Float32[Array, "B H K V"] | None = None,
    in_kernels: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Outputs `[B, T, H, V]`, and the state after the last position.

    q and k are of unit length, q scaled; `decay` is the logarithm g, at most 0. `state` is the
    state before the first position, of its document. Products are in v's dtype, summed in float32,
    the dtype of states and decays. `in_kernels`: by `kernels.delta_rule`, if `states_fit`.
    """
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    if in_kernels:
        q, k = (x.astype(v.dtype) for x in (q, k))
        columns = q, k, v, decay, beta, segment_ids, state
        outputs: Any = delta_rule.chunk_gated_delta_rule(*columns, CHUNK)
        return outputs
    (rows, length, heads, width), groups = v.shape, k.shape[2]
    repeats, pad = heads // groups, -length % CHUNK
    # Padding continues the last document and learns nothing.
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    ids = ids.reshape(rows, -1, CHUNK).swapaxes(0, 1)  # [N, B, C]
    q, k = (_cut_chunks(x.astype(v.dtype), groups, x.shape[3]) for x in (q, k))
    v = _cut_chunks(v, repeats, groups, width)
    decay, beta = (_cut_chunks(x[..., None], repeats, groups, 1)[..., 0] for x in (decay, beta))
    state = state.reshape(rows, repeats, groups, *state.shape[2:])

    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # A GPU sums products of float32 rounded to TensorFloat-32 (10 bits) where bfloat16 (7) is read.
    exact = jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    decays = _accumulate_decays(decay, ids, exact)
    likeness = dot("NBGCK,NBGDK->NBGCD", k, k)[:, :, None]
    itself = jnp.eye(CHUNK, dtype=bool)[None, None, None, None]
    mixing = jnp.where(itself, 0.0, beta[..., None] * decays.pairs * likeness)
    inverse: Array = invert_unit_lower(mixing, exact)
    solve = inverse.astype(v.dtype)
    reads = (dot("NBGCK,NBGDK->NBGCD", q, k)[:, :, None] * decays.pairs).astype(v.dtype)

    # A chunk learns `fresh` less `seen` times the state before it. The loop over chunks has only
    # these two products: its small kernels, one chunk after the other, bound the time.
    fresh = dot("NBRGCD,NBRGDV->NBRGCV", solve, (beta[..., None] * v).astype(v.dtype))
    weighed = ((beta * decays.from_start)[..., None] * k[:, :, None]).astype(v.dtype)
    seen = dot("NBRGCD,NBRGDK->NBRGCK", solve, weighed).astype(v.dtype)
    learned = (decays.to_end[..., None] * k[:, :, None]).astype(v.dtype)
    turns = fresh.astype(v.dtype), seen, learned, decays.from_start[..., -1]
    turns = [x.reshape(len(x), -1, *x.shape[4:]) for x in turns]
    end, before, news = pass_states(*turns, state.reshape(-1, *state.shape[3:]))
    before, news = (x.reshape(*v.shape[:4], *x.shape[2:]) for x in (before, news))
    out = decays.from_start[..., None] * dot("NBGCK,NBRGKV->NBRGCV", q, before)
    out = (out + dot("NBRGCD,NBRGDV->NBRGCV", reads, news)).astype(v.dtype)
    out = jnp.moveaxis(out, -2, 2).swapaxes(0, 1)  # [B, N, C, R, G, V]
    out = out.reshape(rows, -1, heads, width)[:, :length]
    return out, end.reshape(rows, heads, *end.shape[1:])


def _cut_chunks(x: Float[Array, "B T ..."], *shape: int) -> Array:
    """Chunks `[N, B, ..., C, last]` of positions, filled up with zeros; `shape` follows T."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *shape).swapaxes(0, 1), 2, -2)


class _Decays(NamedTuple):
    """Products of the decays between positions of a chunk; 0 between documents."""

    pairs: Float32[Array, "N B R G C C"]  # share of column's update that row's position reads
    from_start: Float32[Array, "N B R G C"]  # share of the state before the chunk
    to_end: Float32[Array, "N B R G C"]  # share of a position's update left at the chunk's end


def _accumulate_decays(
    decay: Float32[Array, "N B R G C"], ids: Int[Array, "N B C"], precision: jax.lax.Precision
) -> _Decays:
    """Sums logarithms of decays within chunks of positions, whose documents are `ids`."""
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    known = (place[:, None] >= place[None])[None, None] & (ids[..., :, None] == ids[..., None, :])
    known = known[:, :, None, None]  # [N, B, 1, 1, C, C]
    # Masked before exp: of later positions it would overflow, and its gradient would be NaN.
    # Summed for each pair: differences of `since` lose what a sum of 1,000 of a fast state rounds.
    since = jnp.cumsum(decay, axis=-1)
    later = place[:, None] > place[None]
    steps = jnp.where(later[(None,) * (decay.ndim - 1)], decay[..., :, None], 0.0)
    upto = (place[:, None] >= place[None]).astype(jnp.float32)
    between = jnp.einsum("CT,NBRGTD->NBRGCD", upto, steps, precision=precision)
    gaps = jnp.where(known, between, 0.0)
    pairs = jnp.where(known, jnp.exp(gaps), 0.0)
    # The state before a chunk is of the document of the chunk before's last position.
    last = jnp.concatenate([ids[:1, :, :1], ids[:-1, :, -1:]])  # [N, B, 1]
    from_start = jnp.where((ids == last)[:, :, None, None], jnp.exp(since), 0.0)
    stays = (ids == ids[..., -1:])[:, :, None, None]
    to_end = jnp.where(stays, jnp.exp(between[..., -1, :]), 0.0)
    return _Decays(pairs, from_start, to_end)


def pass_states(
    fresh: Float[Array, "N P C V"],
    seen: Float[Array, "N P C K"],
    learned: Float[Array, "N P C K"],
    stays: Float32[Array, "N P"],
    state: Float32[Array, "P K V"],
) -> tuple[Float32[Array, "P K V"], Float[Array, "N P K V"], Float[Array, "N P C V"]]:
    """Passes P states through N chunks: S <- stays S + learned^T news, news = fresh - seen S.

    Returns the last states, the states before each chunk, and each chunk's news.
    """
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    @jax.checkpoint
    def step(state: Array, at: Any) -> tuple[Array, tuple[Array, Array]]:
        fresh, seen, learned, stays = at
        before = state.astype(fresh.dtype)
        news = (fresh.astype(jnp.float32) - dot("PCK,PKV->PCV", seen, before)).astype(fresh.dtype)
        state = state * stays[:, None, None] + dot("PCK,PCV->PKV", learned, news)
        return state, (before, news)

    state, (before, news) = jax.lax.scan(step, state, (fresh, seen, learned, stays))
    return state, before, news


_BLOCK = 16  # size of the diagonal blocks that are inverted first


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def invert_unit_lower(
    lower: Float32[Array, "*B C C"], precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> Float32[Array, "*B C C"]:
    """(I + lower)^-1 of strictly lower triangular matrices, C a power of two, by products.

    Blocks of 1, 2, 4, ... are joined: the inverse of [[P, 0], [Q, S]] is [[P', 0], [-S' Q P', S']].
    A series in powers of `lower` would cancel where keys are alike: powers grow as binomials.
    """
    times = functools.partial(jnp.matmul, precision=precision)
    size = lower.shape[-1]
    block = min(_BLOCK, size)
    inverse = delta_rule.invert_blocks(_take_diagonal(lower, block), times)  # [*B, C / 16, 16, 16]
    while block < size:
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        left = _take_diagonal(lower, 2 * block)[..., block:, :block]
        joined = -times(times(second, left), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([joined, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _take_diagonal(x: Array, block: int) -> Array:
    """The square blocks on the diagonal, `[*B, C / block, block, block]`."""
    starts = range(0, x.shape[-1], block)
    return jnp.stack([x[..., i : i + block, i : i + block] for i in starts], axis=-3)


def _differentiate(precision: Any, inverse: Array, gradient: Array) -> tuple[Array]:
    """d(M^-1) = -M^-1 dM M^-1."""
    times = functools.partial(jnp.matmul, precision=precision)
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(times(times(turned, gradient), turned), -1),)


def _invert_and_keep(lower: Array, precision: Any) -> tuple[Array, Array]:
    inverse: Any = invert_unit_lower(lower, precision)
    return inverse, inverse


invert_unit_lower.defvjp(_invert_and_keep, _differentiate)
