"""Weights as they are stored and as they are multiplied.

A weight is stored as an array of numbers, as their bits (`to_bits`), in the blocks of its file
(`PackedMatrix`; `Mixed` for a stack whose layers have different block types), or as float8 with a
scale a row (`Scaled`). Blocks become numbers where they are used, one layer at a time, inside the
layer scan; float8 is multiplied without decoding. `Adapted` is one of these, frozen, with a trained
low-rank change.

`models.decode_weights` makes another layout for generation; `models.shards` spreads weights over
devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from kdjax.device.placement import Placement
from kdjax.formats.blocks import BLOCKS, decode_fields
from kdjax.models.kernels import swiglu
from kdjax.models.kernels.common import EXCLUDED, FP8, fp8_scales
from kdjax.models.shards import Shard, gather_shards

_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(FP8): jnp.uint8}
_NUMBERS = {jnp.dtype(bits): numbers for numbers, bits in _BITS.items()}
_FEW = 64  # rows whose product takes no longer than the widening of a matrix
_WIDENED = 2**20  # numbers of a matrix of bits that are float32 at a time, for few rows


def to_bits(x: Array) -> Array:
    """bf16 numbers as uint16, float8 as uint8; other arrays unchanged.

    XLA's CPU backend cannot slice bf16: it would widen a full stack of layers to float32 before the
    scan, another 5.2 GB for 2.6 GB of weights. Slices of uint16 stay slices.
    """
    return jax.lax.bitcast_convert_type(x, _BITS[x.dtype]) if x.dtype in _BITS else x


_donate_to_bits = jax.jit(to_bits, donate_argnums=0)


def hold_bits(x: Array) -> Array:
    """`to_bits` of an array on devices, which is donated; returns other dtypes unchanged."""
    return _donate_to_bits(x) if x.dtype in _BITS else x


def from_bits(x: Array) -> Array:
    """Undoes `to_bits`."""
    return jax.lax.bitcast_convert_type(x, _NUMBERS[x.dtype]) if x.dtype in _NUMBERS else x


def name_numbers(dtype: DTypeLike) -> str:
    """Name of the numbers that an array of this type holds; "bfloat16" for its bits."""
    return jnp.dtype(_NUMBERS.get(jnp.dtype(dtype), dtype)).name


def quantize_rows(x: Float[Array, "*rows n"]) -> tuple[Float[Array, "*rows n"], Array]:
    """Rows as float8_e4m3fn and one float32 scale each, `[*rows]`: x ~ values * scale.

    The largest number of a row becomes 448. Numbers down to 2^-14.8 of it have 4 significant bits
    (an error of at most 1/16), down to 2^-17.8 fewer; smaller ones become 0. A number that is not
    finite makes its row NaN.
    """
    x = x.astype(jnp.float32)
    scale, inverse = fp8_scales(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return (x * scale).astype(FP8), inverse[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[..., out, in]` in its file's blocks, as `blocks.split` lays them out."""

    fields: tuple[Any, ...]  # arrays [..., out, blocks] or [..., out, blocks, size]
    block: str = dataclasses.field(metadata=dict(static=True))  # a key of `blocks.BLOCKS`
    dtype: DTypeLike = dataclasses.field(metadata=dict(static=True))  # of the decoded numbers

    def __getitem__(self, index: Any) -> "PackedMatrix":
        """Selects layers or rows: `index` applies to the leading axes, never within a row."""
        return dataclasses.replace(self, fields=tuple(field[index] for field in self.fields))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return jax.eval_shape(PackedMatrix.decode, self).shape

    def decode(self) -> Array:
        """The numbers, `[..., out, in]`."""
        return decode_fields(self.fields, self.block, self.dtype)


@jax.jit
def may_be_odd(params: Any) -> Bool[Array, ""]:
    """Whether a number of these weights may be NaN or infinite; False only if none is.

    Decodes no block: see `BlockType.may_be_odd`. A look at a 1.5B took 0.01 s packed and 1.4 s
    dense on two cores, after 0.4 s to compile it.
    """

    def look(weight: Array | PackedMatrix) -> Array:
        if isinstance(weight, PackedMatrix):
            return jnp.any(BLOCKS[weight.block].may_be_odd(*weight.fields))
        return jnp.any(~jnp.isfinite(from_bits(weight)))

    weights = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, PackedMatrix))
    return jnp.any(jnp.stack([look(weight) for weight in weights]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A stack of L layers of several block types: one stack for each type, and each layer's place.

    Q4_K_M files keep half of their value and down projections in Q6_K.
    """

    # Typed loosely, as `PackedMatrix.fields`: JAX builds its own trees of shapes and shardings with
    # them.
    stacks: tuple[Any, ...]  # of PackedMatrix
    which: Any  # int32 [L], index into `stacks`
    slot: Any  # int32 [L], index into that stack

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers of all layers."""
        return (len(self.which), *self.stacks[0].shape[1:])

    def read(self, which: Int[Array, ""], slot: Int[Array, ""]) -> Array:
        """The numbers of one layer, `[out, in]`; only that layer's blocks are decoded."""

        def branch(stack: PackedMatrix) -> Callable[[Array], Array]:
            return lambda slot: gather_shards(stack[slot]).decode()

        return jax.lax.switch(which, [branch(stack) for stack in self.stacks], slot)

    def decode(self) -> Array:
        """The numbers of one layer, if `which` and `slot` are one layer's."""
        return self.read(self.which, self.slot)


def stack_blocks(
    parts: Sequence[tuple[str, tuple[int, ...] | None, tuple[Any, ...]]],
) -> PackedMatrix | Mixed:
    """A matrix, or a stack, from the fields of its blocks: type, layers (None: all), fields.

    Its decoded numbers are float32.
    """
    stacks = tuple(
        PackedMatrix(fields, dtype, jnp.dtype(jnp.float32)) for dtype, _, fields in parts
    )
    if len(stacks) == 1:
        return stacks[0]
    place = {
        layer: (which, slot)
        for which, (_, layers, _) in enumerate(parts)
        for slot, layer in enumerate(layers or ())
    }
    which, slot = np.array([place[layer] for layer in sorted(place)], np.int32).T
    return Mixed(stacks, which, slot)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix `[..., out, in]` as float8_e4m3fn, with a scale for each row."""

    values: Any  # float8_e4m3fn [..., out, in], or its bits
    scale: Any  # float32 [..., out]
    # Whether a gated product is rounded by a kernel, as `Placement.kernels` says.
    kernels: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def decode(self) -> Float32[Array, "*lead out in"]:
        """The numbers, values times scales."""
        return from_bits(self.values).astype(jnp.float32) * self.scale[..., None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return self.values.shape

    def __getitem__(self, index: Any) -> "Scaled":
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index])

    def project(self, x: "Array | Float8Rows", out: DTypeLike | None = None) -> Float[Array, "N F"]:
        """x W^T in x's dtype, or `out`; x `[N, D]` is rounded to float8 with a scale a row.

        Both scales are applied to the output. cuBLASLt takes only one scale for each operand, but
        XLA passes it a product of two unscaled float8 arrays, and fuses the scales with the
        operations that follow.
        """
        rows = self.round(x)
        y = self.unscaled(rows, out)
        return (y.astype(jnp.float32) * rows.scale[:, None] * self.scale[None]).astype(y.dtype)

    def round(self, x: "Array | Float8Rows") -> "Float8Rows":
        """x `[N, D]` rounded to float8, with a scale a row, unless it is already."""
        if isinstance(x, Float8Rows):
            return x
        return Float8Rows(*quantize_rows(x), x.dtype)

    def unscaled(self, x: "Float8Rows", out: DTypeLike | None = None) -> Float[Array, "N F"]:
        """The product of the float8 numbers, without scales."""
        return jax.lax.dot_general(
            x.values,
            from_bits(self.values),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=out or x.dtype,  # bf16 has float32's range: no sum overflows
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SomeRows:
    """The unembedding of some ids; any other id has the logit `EXCLUDED`."""

    rows: Any  # [N, D]: numbers
    places: Any  # int32 [V]: the row of each id, N for an id without one

    def __getitem__(self, index: Any) -> "SomeRows":
        return dataclasses.replace(self, places=self.places[index])

    def astype(self, dtype: DTypeLike) -> "SomeRows":
        """The rows in another dtype."""
        return dataclasses.replace(self, rows=self.rows.astype(dtype))


@dataclasses.dataclass(frozen=True)
class Float8Rows:
    """Activations rounded for products with `Scaled` weights, which can share them."""

    values: Float[Array, "N D"]  # float8_e4m3fn
    scale: Float32[Array, " N"]
    dtype: DTypeLike  # of the numbers before rounding, and of products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """Several weights concatenated by `decode_weights.join`, so that q, k and v are one product.

    It takes the place of the first; the other places hold empty matrices.
    """

    values: Any  # numbers [out, in]
    sizes: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # rows of each weight

    def project(self, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
        """x W^T, in the dtype of the values."""
        return jnp.einsum("ND,FD->NF", x.astype(self.values.dtype), self.values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen matrix W `[..., out, in]` and its low-rank change, which is trained.

    y = x W^T + scale (x A^T) B^T (LoRA: Hu et al. 2021, arXiv:2106.09685). No gradient of W is ever
    formed. The backward pass decodes a layer's blocks again: their numbers are not stored.
    """

    base: Any  # a stored weight
    a: Any = None  # float32 [..., rank, in]; None: W is frozen, without a change
    b: Any = None  # float32 [..., out, rank]
    # float32 [..., in]; its gradient is the sum of the squares of the inputs x of W. Or
    # [..., N, in], where the gradient is x.
    sums: Any = None
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        return tuple(self.base.shape)

    def decode(self) -> Float32[Array, "*lead out in"]:
        """The numbers of one layer with its change: W + scale B A."""
        numbers = _decode_frozen(self.base).astype(jnp.float32)
        return numbers if self.a is None else numbers + self.change

    @property
    def change(self) -> Float32[Array, "*lead out in"]:
        """scale B A, in full precision."""
        product = jnp.matmul(self.b, self.a, precision=jax.lax.Precision.HIGHEST)
        return self.scale * product

    def project(self, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
        """x W^T and its change, in x's dtype."""
        return _project_adapted(x, [self])[0]


def _decode_frozen(base: Any) -> Array:
    """The numbers of one layer of a frozen matrix."""
    if isinstance(base, Mixed):
        return base.decode()
    return decode_weight(gather_shards(base))


def _project_adapted(x: Array, weights: Sequence[Adapted]) -> list[Array]:
    """x W^T and its change for several weights; what they share of x is one product."""
    products = [
        _project_frozen(x if w.sums is None else _tap_input(x, w.sums), w.base) for w in weights
    ]
    changed = [i for i, w in enumerate(weights) if w.a is not None]
    if not changed:
        return products
    stacked = jnp.concatenate([weights[i].a.astype(x.dtype) for i in changed])
    ranks = [weights[i].a.shape[0] for i in changed]
    low = jnp.split(jnp.einsum("ND,RD->NR", x, stacked), np.cumsum(ranks)[:-1], axis=-1)
    for i, narrow in zip(changed, low, strict=True):
        b = (weights[i].scale * weights[i].b).astype(x.dtype)
        products[i] = products[i] + jnp.einsum("NR,FR->NF", narrow, b)
    return products


@jax.custom_vjp
def _tap_input(x: Array, sums: Array) -> Array:
    """x unchanged; the gradient of `sums` is the sum of squares of x over rows, or x itself."""
    return x


def _tap_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, sums = residuals
    x = x.astype(jnp.float32)
    return gradient, jnp.sum(jnp.square(x), axis=0) if sums.ndim == 1 else x


_tap_input.defvjp(lambda x, sums: (x, (x, sums)), _tap_backward)


def _project_frozen(x: Array, base: Any) -> Array:
    """x W^T for a frozen W in any stored form; only x has a gradient."""
    if isinstance(base, Scaled):
        return _project_scaled(x, base)
    if isinstance(base, Array) and base.dtype == x.dtype:
        return project(x, base)

    def run(x: Array, base: Any) -> Array:
        numbers = jax.lax.stop_gradient(_decode_frozen(base)).astype(x.dtype)
        return jnp.einsum("ND,FD->NF", x, numbers)

    # For the backward pass only x and the stored blocks are kept. Layers run in a loop
    # (`Decoder.run_layers`), whose two directions XLA cannot merge.
    return jax.checkpoint(run, prevent_cse=False)(x, base)


@jax.custom_vjp
def _project_scaled(x: Array, base: Scaled) -> Array:
    """A float8 product; the gradient of x ignores its rounding (straight-through)."""
    return gather_shards(base).project(x)


def _scaled_backward(residuals: Any, gradient: Array) -> tuple[Array, None]:
    numbers = _decode_frozen(residuals).astype(gradient.dtype)
    return jnp.einsum("NF,FD->ND", gradient, numbers), None


_project_scaled.defvjp(lambda x, base: (_project_scaled(x, base), base), _scaled_backward)


# A weight in every form it can have; an Array holds numbers or their bits.
Weight = Array | PackedMatrix | Mixed | Scaled | Joined | Shard | Adapted


def round_for(x: Array | Float8Rows, weight: Weight) -> Array | Float8Rows:
    """x in the form that products with this weight take: float8 for a `Scaled` weight."""
    return weight.round(x) if isinstance(weight, Scaled) else x


def project(
    x: Array | Float8Rows, weight: Array | Scaled | Joined | Adapted
) -> Float[Array, "N F"]:
    """x W^T in x's dtype, for a layer's weight as numbers, as bits, or with a method `project`."""
    if isinstance(weight, Scaled):
        return weight.project(x)
    assert not isinstance(x, Float8Rows)  # float8 is for `Scaled` weights only
    if isinstance(weight, Adapted):
        return weight.project(x)
    if isinstance(weight, Joined):
        return weight.project(x).astype(x.dtype)
    if weight.dtype == jnp.uint16 and x.shape[0] <= _FEW:
        return _project_bits(x, weight).astype(x.dtype)
    return jnp.einsum("ND,FD->NF", x, from_bits(weight).astype(x.dtype))


def _project_bits(x: Float[Array, "N D"], bits: Array) -> Float32[Array, "N F"]:
    """x W^T for few rows of x and a matrix in the bits of bf16, some rows of it at a time.

    XLA's CPU backend widens bf16 one number after another, which takes twenty times as long as the
    product of one row; a shift of bits is vectorised, and its results stay in the caches.
    """
    rows, width = bits.shape
    most = min(max(_WIDENED // width, 1), rows)
    wide, starts = x.astype(jnp.float32), range(0, rows, most)

    def part(_: None, start: Array) -> tuple[None, Array]:
        words = jax.lax.dynamic_slice_in_dim(bits, start, most).astype(jnp.uint32) << 16
        numbers = jax.lax.bitcast_convert_type(words, jnp.float32)
        return None, jnp.einsum("ND,FD->NF", wide, numbers)

    # The last part overlaps the one before, so that all have equal sizes.
    at = jnp.asarray([min(start, rows - most) for start in starts], jnp.int32)
    parts = jax.lax.scan(part, None, at)[1].swapaxes(0, 1)
    rest = rows - starts[-1]
    return jnp.concatenate(
        [parts[:, :-1].reshape(x.shape[0], -1), parts[:, -1, most - rest :]], axis=1
    )


def project_all(
    x: Array | Float8Rows,
    weights: Sequence[Array | Scaled | Joined | Adapted],
    placement: Placement | None = None,
    *,
    whole: bool = False,
) -> list[Float[Array, "N F"]]:
    """x W^T for several weights of one kind and dtype.

    Weights that are cast anyway, a student's float32 masters, are joined into one product: the cast
    writes them joined, and the backward pass computes one gradient of x instead of a sum of
    several. Where `tensor` splits rows they are not, since joining would move rows between devices.
    With `whole` the first product has the columns of all that are joined: cutting it is a copy.
    """
    adapted = [w for w in weights if isinstance(w, Adapted)]
    if adapted:
        assert len(adapted) == len(weights) and not isinstance(x, Float8Rows)
        return _project_adapted(x, adapted)
    joined = [w for w in weights if isinstance(w, Joined)]
    if joined:
        parts = [(project(x, w), w.sizes) for w in joined]
        split = [z for y, sizes in parts for z in jnp.split(y, np.cumsum(sizes)[:-1], axis=-1)]
        return [parts[0][0], *split[1:]] if whole else split
    single = [w for w in weights if not isinstance(w, Joined | Adapted)]
    numbers = [from_bits(w) for w in single if not isinstance(w, Scaled)]
    cast = bool(numbers) and numbers[0].dtype != x.dtype
    if not cast or (placement is not None and placement.mesh.shape["tensor"] > 1):
        return [project(x, w) for w in single]
    y = project(x, jnp.concatenate([w.astype(x.dtype) for w in numbers]))
    split = jnp.split(y, np.cumsum([w.shape[0] for w in numbers])[:-1], axis=-1)
    return [y, *split[1:]] if whole else split


def gate_rows(
    x: Array | Float8Rows,
    gate: Array | Scaled | Joined | Adapted,
    up: Array | Scaled | Adapted,
    activation: Callable[[Array], Array],
    placement: Placement | None = None,
) -> Array | Float8Rows:
    """activation(x gate^T) * (x up^T), `[N, F]`, for weights of one kind; float8 by a kernel."""
    match x, gate, up:
        case Float8Rows(), Scaled(kernels=True), Scaled() if activation is jax.nn.silu:
            unscaled = gate.unscaled(x), up.unscaled(x)
            values, scale = swiglu.gate_and_round(*unscaled, x.scale, gate.scale, up.scale)
            return Float8Rows(values, scale, x.dtype)
    to_gate, to_up = project_all(x, (gate, up), placement)
    product = activation(to_gate) * to_up
    # XLA would fuse this product with its rounding to float8, and read both factors twice: at a
    # 7B's width of 18,944 that takes longer than to write the product first.
    return jax.lax.optimization_barrier(product) if isinstance(x, Float8Rows) else product


def unembed(
    hidden: Float[Array, "B T D"], head: Array | Scaled | Joined | SomeRows
) -> Float32[Array, "B T V"]:
    """Logits of hidden states, for a head of numbers, of some ids, `Scaled`, or for few rows.

    The product's output is float32: bf16 logits cause an error of 4% in a KL of 3e-3.
    """
    if isinstance(head, SomeRows):
        logits = jnp.pad(
            unembed(hidden, head.rows), ((0, 0), (0, 0), (0, 1)), constant_values=EXCLUDED
        )
        return logits[..., head.places]
    if isinstance(head, Joined):
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
        return head.project(flat).reshape(*hidden.shape[:-1], -1)
    if isinstance(head, Scaled):
        flat = hidden.reshape(-1, hidden.shape[-1])
        # XLA rounds here, not the kernel: after the kernel XLA schedules the logits earlier
        # and holds 5 GB of them longer.
        rows = Float8Rows(*quantize_rows(flat), flat.dtype)
        return head.project(rows, jnp.float32).reshape(*hidden.shape[:-1], -1)
    return jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)


def mask_padding(logits: Float[Array, "*B V"], real: int, fill: float = EXCLUDED) -> Array:
    """The logits, with `fill` for ids from `real` on: padding rows of a head are not tokens.

    They are masked, not sliced: 151,936 columns keep the matrix product aligned, 151,665 do not.
    """
    if real >= logits.shape[-1]:
        return logits
    exists = jnp.arange(logits.shape[-1], dtype=jnp.int32) < real
    return jnp.where(jnp.expand_dims(exists, tuple(range(logits.ndim - 1))), logits, fill)


def _is_weight(x: Any) -> bool:
    return isinstance(x, PackedMatrix | Mixed | Scaled | Shard | Adapted)


def decode_weight(weight: Array | PackedMatrix | Scaled | Adapted) -> Array:
    """The numbers of a stored weight."""
    return (
        weight.decode()
        if isinstance(weight, PackedMatrix | Scaled | Adapted)
        else from_bits(weight)
    )


def slice_layers(stacked: Any, *, by_index: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """Returns what a scan over layers slices, and the function from a slice to the layer's weights.

    `PackedMatrix` and `Mixed` weights are decoded to numbers; `Adapted` ones are not, since their
    products decode them; others are unchanged. The stacks of a `Mixed` weight, and with `by_index`
    all blocks, stay outside the scan's inputs: layers pick from them by index.
    """

    def cut(weight: Any) -> Any:
        if isinstance(weight, Adapted):
            return dataclasses.replace(weight, base=cut(weight.base))
        if by_index and isinstance(weight, PackedMatrix):
            return jnp.arange(jax.tree.leaves(weight)[0].shape[0], dtype=jnp.int32)
        return (weight.which, weight.slot) if isinstance(weight, Mixed) else weight

    xs = jax.tree.map(cut, stacked, is_leaf=_is_weight)

    def read(slices: Any) -> Any:
        def one(weight: Any, piece: Any) -> Any:
            if isinstance(weight, Adapted):
                if isinstance(weight.base, Mixed):
                    which, slot = piece.base
                    base = dataclasses.replace(weight.base, which=which, slot=slot)
                    piece = dataclasses.replace(piece, base=base)
                return piece
            if isinstance(weight, Mixed):
                return weight.read(*piece)
            if by_index and isinstance(weight, PackedMatrix):
                piece = weight[piece]
            piece = gather_shards(piece)
            return piece.decode() if isinstance(weight, PackedMatrix) else piece

        return jax.tree.map(one, stacked, slices, is_leaf=_is_weight)

    return xs, read
