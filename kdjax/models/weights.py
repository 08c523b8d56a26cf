"""Weights as they are stored and as they are multiplied.

A weight is stored as an array of numbers, as their bits (`to_bits`), in the blocks of its file
(`Packed`; `Mixed` for a stack whose layers have different block types), or as float8 with a scale a
row (`Scaled`). Blocks become numbers where they are used, one layer at a time, inside the layer
scan; float8 is multiplied as it is.

On a mesh with `fsdp` a device holds a `Shard` of each matrix, gathered where it is used.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from kdjax.device.placement import Placement
from kdjax.device.sharding import ROW_AXES, ROWS, replicated
from kdjax.formats.blocks import Whole, decode_fields, read_whole
from kdjax.models import kernels
from kdjax.models.kernels import EXCLUDED, FP8, fp8_scales

_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(FP8): jnp.uint8}
_NUMBERS = {jnp.dtype(bits): numbers for numbers, bits in _BITS.items()}
_FEW = 64  # rows whose product takes no longer than the widening of a matrix
_WIDENED = 2**20  # numbers of a matrix that are float32 at a time
_GROUP = 16  # numbers of a `Grouped` row that share a factor: what all block types' groups hold


def to_bits(x: Array) -> Array:
    """bf16 numbers as uint16, float8 as uint8; anything else as it is.

    XLA's CPU backend slices no bf16: it would widen a whole stack of layers to float32 before the
    scan, 2.6 GB of weights becoming 5.2 beside it. Slices of uint16 stay slices.
    """
    return jax.lax.bitcast_convert_type(x, _BITS[x.dtype]) if x.dtype in _BITS else x


def from_bits(x: Array) -> Array:
    """Undoes `to_bits`."""
    return jax.lax.bitcast_convert_type(x, _NUMBERS[x.dtype]) if x.dtype in _NUMBERS else x


def quantize_rows(x: Float[Array, "*rows n"]) -> tuple[Float[Array, "*rows n"], Array]:
    """Rows as float8_e4m3fn and one float32 scale each, `[*rows]`: x ~ values * scale.

    The largest number of a row becomes 448. Down to 2^-14.8 of it the others keep 4 significant
    bits (an error of at most 1/16), down to 2^-17.8 fewer, and below that they become 0. Not finite
    numbers make their row NaN.
    """
    x = x.astype(jnp.float32)
    scale, inverse = fp8_scales(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return (x * scale).astype(FP8), inverse[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix `[..., out, in]` in its file's blocks, as `blocks.split` lays them out."""

    fields: tuple[Any, ...]  # arrays [..., out, blocks] or [..., out, blocks, size]
    block: str = dataclasses.field(metadata=dict(static=True))  # a key of `blocks.BLOCKS`
    dtype: DTypeLike = dataclasses.field(metadata=dict(static=True))  # of the numbers it stands for

    def __getitem__(self, index: Any) -> "Packed":
        """Layers or rows: `index` applies to the leading axes, never within a row."""
        return dataclasses.replace(self, fields=tuple(field[index] for field in self.fields))

    def decode(self) -> Array:
        """The numbers, `[..., out, in]`."""
        return decode_fields(self.fields, self.block, self.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether `regroup` can make them whole numbers."""
        exact = jnp.dtype(self.dtype) == jnp.float32  # rounded ones are no longer factor * q
        return exact and jax.eval_shape(self._read_whole) is not None

    def _read_whole(self) -> Whole | None:
        return read_whole(self.fields, self.block)

    def regroup(self, *, minimums: bool = False) -> "Grouped":
        """The matrix `[out, in]` as whole numbers; with `minimums` also where all are 0."""
        whole = self._read_whole()
        assert whole is not None
        q, factors, lowest = whole
        if minimums and lowest is None:
            lowest = jnp.zeros_like(factors)
        repeats = q.shape[1] // factors.shape[1] // _GROUP
        pieces = q.reshape(q.shape[0], -1, _GROUP).swapaxes(1, 2).reshape(q.shape)
        shared = (x if x is None else jnp.repeat(x, repeats, axis=1) for x in (factors, lowest))
        return Grouped(pieces.astype(jnp.int8), *shared)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """A matrix `[out, in]` as whole numbers, laid for the product with one row on a CPU.

    A row's groups of `_GROUP` numbers share a factor and a minimum: factor * q - minimum. First
    come the first numbers of all groups, then the second ones, and so on.
    """

    values: Any  # int8 [out, in]
    factors: Any  # float32 [out, groups]
    minimums: Any  # float32 [out, groups], or None

    def project(self, x: Float[Array, "N D"]) -> Float32[Array, "N F"]:
        """x W^T. One row reads a byte a number; of several, numbers are widened first."""
        groups = x.astype(jnp.float32).reshape(x.shape[0], -1, _GROUP)
        turned = groups.swapaxes(1, 2).reshape(x.shape)
        if x.shape[0] == 1:
            sums = _add_pieces(turned, self.values, self.factors.shape[1], _to_float32)
            y = _add_columns(sums * self.factors)[None]
        else:
            wide = _to_float32(self.values).reshape(self.values.shape[0], _GROUP, -1)
            wide = (wide * self.factors[:, None]).reshape(self.values.shape)
            y = jnp.einsum("ND,FD->NF", turned, wide)
        if self.minimums is None:
            return y
        return y - jnp.einsum("NG,FG->NF", jnp.sum(groups, axis=-1), self.minimums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A stack of L layers of several block types: one stack a type, and where each layer lies.

    Q4_K_M files keep half of their value and down projections in Q6_K.
    """

    # Typed loosely, as `Packed.fields`: JAX builds its own trees of shapes and shardings with them.
    stacks: tuple[Any, ...]  # of Packed
    which: Any  # int32 [L], index into `stacks`
    slot: Any  # int32 [L], index into that stack

    def decode(
        self,
        which: Int[Array, ""],
        slot: Int[Array, ""],
        read: Callable[[Packed], Any] = Packed.decode,
    ) -> Any:
        """The numbers of one layer, `[out, in]`, or what `read` makes; only its type is decoded."""

        def branch(stack: Packed) -> Callable[[Array], Any]:
            return lambda slot: read(gather_shards(stack[slot]))

        return jax.lax.switch(which, [branch(stack) for stack in self.stacks], slot)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix `[..., out, in]` as float8_e4m3fn, each row with a scale of its own."""

    values: Any  # float8_e4m3fn [..., out, in], or its bits
    scale: Any  # float32 [..., out]
    # Whether products are summed in float32 throughout. Hopper's fp8 tensor cores otherwise keep
    # about 14 bits of a running sum.
    precise: bool = dataclasses.field(default=False, metadata=dict(static=True))
    # Whether activations are rounded by `models.kernels`, as `Placement.kernels` says.
    kernels: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def decode(self) -> Float32[Array, "*lead out in"]:
        """The numbers it stands for."""
        return from_bits(self.values).astype(jnp.float32) * self.scale[..., None]

    def __getitem__(self, index: Any) -> "Scaled":
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index])

    def project(self, x: "Array | Rounded", out: DTypeLike | None = None) -> Float[Array, "N F"]:
        """x W^T, x `[N, D]` rounded to float8 with a scale a row if it is not yet.

        In x's dtype, or in `out`. Both scales go on the output: cuBLASLt takes scales of whole
        operands only, but XLA gives it a product of two unscaled float8 arrays as it is, and fuses
        the rest with what comes next.
        """
        rows = self.round(x)
        y = self.unscaled(rows, out)
        return (y.astype(jnp.float32) * rows.scale[:, None] * self.scale[None]).astype(y.dtype)

    def round(self, x: "Array | Rounded") -> "Rounded":
        """x `[N, D]` as this weight's products take it; as it is if rounded already."""
        if isinstance(x, Rounded):
            return x
        round_rows = kernels.round_rows if self.kernels else quantize_rows
        return Rounded(*round_rows(x), x.dtype)

    def unscaled(self, x: "Rounded", out: DTypeLike | None = None) -> Float[Array, "N F"]:
        """The product of the float8 numbers alone."""
        return jax.lax.dot_general(
            x.values,
            from_bits(self.values),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if self.precise else jax.lax.Precision.DEFAULT,
            preferred_element_type=out or x.dtype,  # bf16 has float32's range: no sum overflows
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices that multiply the same rows as one `[out, in]`, at the place of the first.

    The others are matrices of no row. The product is one of their own dtype. For one row on a CPU
    they may be `Grouped`, or the bits of bf16.
    """

    values: Any
    sizes: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # rows of each


def join(weights: Sequence[Array | Grouped]) -> list[Array | Joined]:
    """What takes the places of several matrices of one kind for `project_all`, or of one.

    Matrices of several kinds stay apart.
    """
    kinds = {(jax.tree.structure(w), jax.tree.leaves(w)[0].dtype) for w in weights}
    if len(kinds) > 1:
        return [one for w in weights for one in join([w])]
    first = jax.tree.leaves(weights[0])[0]
    none = jnp.zeros((0, first.shape[1]), first.dtype)
    sizes = tuple(jax.tree.leaves(w)[0].shape[0] for w in weights)
    whole = Joined(jax.tree.map(lambda *x: jnp.concatenate(x), *weights), sizes)
    return [whole, *[none] * (len(weights) - 1)]


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Activations as the products of `Scaled` weights take them, for several to share."""

    values: Float[Array, "N D"]  # float8_e4m3fn
    scale: Float32[Array, " N"]
    dtype: DTypeLike  # of the numbers that were rounded, and of what is made of them


Weight = (
    Array | Packed | Mixed | Scaled | Joined
)  # a stored weight; an Array holds numbers or their bits


def round_for(x: Array | Rounded, weight: Weight) -> Array | Rounded:
    """x as products with this weight take it: float8 for a `Scaled` one."""
    return weight.round(x) if isinstance(weight, Scaled) else x


def project(x: Array | Rounded, weight: Array | Scaled | Joined) -> Float[Array, "N F"]:
    """x W^T in x's dtype, for a layer's weight that is numbers, their bits, or `Scaled`."""
    if isinstance(weight, Scaled):
        return weight.project(x)
    assert not isinstance(x, Rounded)  # float8 is for `Scaled` weights only
    if isinstance(weight, Joined):
        return _project_ready(x, weight.values).astype(x.dtype)
    if weight.dtype == jnp.uint16 and x.shape[0] <= _FEW:
        return _project_bits(x, weight).astype(x.dtype)
    return jnp.einsum("ND,FD->NF", x, from_bits(weight).astype(x.dtype))


def _project_ready(x: Float[Array, "N D"], weight: Array | Grouped) -> Float[Array, "N F"]:
    """x W^T for what `make_ready` gave."""
    if isinstance(weight, Grouped):
        return weight.project(x)
    if weight.dtype != jnp.uint16:
        return jnp.einsum("ND,FD->NF", x.astype(weight.dtype), weight)
    wide, pieces = x.astype(jnp.float32), _count_pieces(weight.shape[1])
    if pieces and x.shape[0] == 1:
        return _add_columns(_add_pieces(wide, weight, weight.shape[1] // pieces, _widen))[None]
    return jnp.einsum("ND,FD->NF", wide, _widen(weight))


def _to_float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _widen(bits: Array) -> Array:
    """The bits of bf16 as float32, by a shift, which runs in vectors."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _count_pieces(width: int) -> int:
    """The least number of pieces, 16 or more, of equal widths that are multiples of 16; 0 for none.

    More are slower. Of fewer XLA computes what makes x again for each row of the matrix: it repeats
    code up to 15 times, whatever barrier there is.
    """
    return next((n for n in range(16, width // 16 + 1) if width % (16 * n) == 0), 0)


def _add_pieces(
    x: Float32[Array, "1 D"], weight: Array, width: int, read: Callable[[Array], Array]
) -> Float32[Array, "F width"]:
    """The sum over pieces of `width` columns of x times the weight as `read` makes float32 of it.

    XLA's CPU backend converts and multiplies in vectors here; it does not where it converts and
    reduces at once, which takes four to ten times as long.
    """
    # x is written before each row of the matrix reads it. And tied to it the weight is nothing that
    # a loop over ids could convert once for all of them, four bytes a number.
    x, weight = jax.lax.optimization_barrier((x, weight))
    places = range(0, x.shape[1], width)
    parts = (x[:, i : i + width] * read(weight[:, i : i + width]) for i in places)
    return functools.reduce(jnp.add, parts)


def _add_columns(x: Float32[Array, "F W"]) -> Float32[Array, " F"]:
    """The sum over the last axis, as a product, which is faster; what is added is written first."""
    ones = jnp.ones(x.shape[1], jnp.float32)
    return jnp.einsum("FW,W->F", jax.lax.optimization_barrier(x), ones)


def _project_bits(x: Float[Array, "N D"], bits: Array) -> Float32[Array, "N F"]:
    """x W^T for few rows and a matrix in the bits of bf16, some of its rows at a time.

    XLA's CPU backend widens bf16 one number after another, which takes twenty times as long as one
    row's product; a shift of bits runs in vectors, and what it makes stays in the caches.
    """
    rows, width = bits.shape
    most = min(max(_WIDENED // width, 1), rows)
    wide, starts = x.astype(jnp.float32), range(0, rows, most)

    def part(_: None, start: Array) -> tuple[None, Array]:
        numbers = _widen(jax.lax.dynamic_slice_in_dim(bits, start, most))
        return None, jnp.einsum("ND,FD->NF", wide, numbers)

    # The last part begins where it has as many rows as the others.
    at = jnp.asarray([min(start, rows - most) for start in starts], jnp.int32)
    parts = jax.lax.scan(part, None, at)[1].swapaxes(0, 1)
    rest = rows - starts[-1]
    return jnp.concatenate(
        [parts[:, :-1].reshape(x.shape[0], -1), parts[:, -1, most - rest :]], axis=1
    )


def project_all(
    x: Array | Rounded,
    weights: Sequence[Array | Scaled | Joined],
    placement: Placement | None = None,
) -> list[Float[Array, "N F"]]:
    """x W^T for several weights of one kind and dtype.

    Weights that are cast anyway, a student's float32 masters, are joined into one product: the cast
    joins them without a pass of its own, and the backward pass makes one gradient of x in place of
    a sum of several. Not where `tensor` splits rows: joining would move them between devices.
    """
    joined = [w for w in weights if isinstance(w, Joined)]
    if joined:
        parts = (jnp.split(project(x, w), np.cumsum(w.sizes)[:-1], axis=-1) for w in joined)
        return [y for split in parts for y in split]
    single = [w for w in weights if not isinstance(w, Joined)]
    numbers = [from_bits(w) for w in single if not isinstance(w, Scaled)]
    cast = bool(numbers) and numbers[0].dtype != x.dtype
    if not cast or (placement is not None and placement.mesh.shape["tensor"] > 1):
        return [project(x, w) for w in single]
    y = project(x, jnp.concatenate([w.astype(x.dtype) for w in numbers]))
    return jnp.split(y, np.cumsum([w.shape[0] for w in numbers])[:-1], axis=-1)


def gate_rows(
    x: Array | Rounded,
    gate: Array | Scaled | Joined,
    up: Array | Scaled,
    activation: Callable[[Array], Array],
    placement: Placement | None = None,
) -> Array | Rounded:
    """activation(x gate^T) * (x up^T), `[N, F]`, for weights of one kind; float8 if by a kernel."""
    match x, gate, up:
        case Rounded(), Scaled(kernels=True), Scaled() if activation is jax.nn.silu:
            unscaled = gate.unscaled(x), up.unscaled(x)
            values, scale = kernels.gate_and_round(*unscaled, x.scale, gate.scale, up.scale)
            return Rounded(values, scale, x.dtype)
    to_gate, to_up = project_all(x, (gate, up), placement)
    product = activation(to_gate) * to_up
    # XLA would fuse this product with its rounding to float8, and read both factors twice: at a
    # 7B's width of 18,944 that takes longer than to write the product first.
    return jax.lax.optimization_barrier(product) if isinstance(x, Rounded) else product


def unembed(
    hidden: Float[Array, "B T D"], head: Array | Scaled | Joined
) -> Float32[Array, "B T V"]:
    """Logits of hidden states, for a head that is numbers, `Scaled`, or ready for few rows.

    float32 out of the product: bf16 logits put an error of 4% on a KL of 3e-3.
    """
    if isinstance(head, Joined):
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
        return _project_ready(flat, head.values).reshape(*hidden.shape[:-1], -1)
    if isinstance(head, Scaled):
        flat = hidden.reshape(-1, hidden.shape[-1])
        # Rounded by XLA and not by our kernel: after the kernel, XLA schedules the logits earlier
        # and holds 5 GB of them longer.
        rows = Rounded(*quantize_rows(flat), flat.dtype)
        return head.project(rows, jnp.float32).reshape(*hidden.shape[:-1], -1)
    return jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)


def mask_padding(logits: Float[Array, "*B V"], real: int, fill: float = EXCLUDED) -> Array:
    """The logits, with `fill` for ids from `real` on: padding rows of a head are no tokens.

    Masked and not sliced: 151,936 columns keep the matrix product aligned, 151,665 do not.
    """
    if real >= logits.shape[-1]:
        return logits
    exists = jnp.arange(logits.shape[-1], dtype=jnp.int32) < real
    return jnp.where(jnp.expand_dims(exists, tuple(range(logits.ndim - 1))), logits, fill)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Packed | Mixed | Scaled | Shard)


def decode_weight(weight: Array | Packed | Scaled) -> Array:
    """The numbers of a stored weight."""
    return weight.decode() if isinstance(weight, Packed | Scaled) else from_bits(weight)


def make_ready(
    weight: Array | Packed | Scaled | Grouped, dtype: DTypeLike, *, narrow: bool
) -> Array | Grouped:
    """A weight as products of few rows take it: numbers of `dtype`, or no wider than stored."""
    if narrow and isinstance(weight, Packed) and weight.is_whole:
        return weight.regroup()
    if isinstance(weight, Grouped):
        return weight
    bits = to_bits(decode_weight(weight))
    return bits if narrow and bits.dtype == jnp.uint16 else from_bits(bits).astype(dtype)


def slice_layers(stacked: Any, *, narrow: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """What a scan over layers slices, and the function from a slice to the layer's weights.

    `Packed` and `Mixed` weights come out as numbers, `Grouped` ones if `narrow`, others as they
    are. The stacks of a `Mixed` weight stay outside the scan's inputs: layers pick from them by
    index.
    """
    xs = jax.tree.map(
        lambda w: (w.which, w.slot) if isinstance(w, Mixed) else w, stacked, is_leaf=_is_weight
    )

    def read(slices: Any) -> Any:
        def one(weight: Any, piece: Any) -> Any:
            if isinstance(weight, Mixed):
                if narrow and all(stack.is_whole for stack in weight.stacks):
                    read = functools.partial(Packed.regroup, minimums=True)
                    return weight.decode(*piece, read=read)
                return weight.decode(*piece)
            piece = gather_shards(piece)
            if not isinstance(weight, Packed):
                return piece
            return piece.regroup() if narrow and piece.is_whole else piece.decode()

        return jax.tree.map(one, stacked, slices, is_leaf=_is_weight)

    return xs, read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """This device's part of an array that a mesh splits; exists within `Spread.map_rows` alone."""

    part: Any
    axis: int = dataclasses.field(metadata=dict(static=True))  # counted from the last, below 0
    over: str = dataclasses.field(metadata=dict(static=True))  # "fsdp" or "data", of the mesh
    # In which float32 numbers travel, as what multiplies them takes them; None: as they are.
    dtype: DTypeLike | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "Shard":
        """Layers: `index` applies to axes before the split one."""
        return dataclasses.replace(self, part=self.part[index])

    def gather(self) -> Array:
        """The whole array. Its gradient is summed over the devices and scattered again."""
        axis = self.part.ndim + self.axis
        if self.dtype is not None and self.part.dtype == jnp.float32:
            return _gather_as(self.part, axis, self.over, self.dtype)
        # NCCL has no float8; its bits travel as well.
        bits = to_bits(self.part) if self.part.dtype == FP8 else self.part
        whole = jax.lax.all_gather(bits, self.over, axis=axis, tiled=True)
        return from_bits(whole) if self.part.dtype == FP8 else whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_as(part: Array, axis: int, over: str, dtype: DTypeLike) -> Array:
    """The float32 array of which devices hold parts, rounded to `dtype`; its gradient is not."""
    sent, count = part.astype(dtype), jax.lax.axis_size(over)
    if over == "fsdp":
        return jax.lax.all_gather(sent, over, axis=axis, tiled=True).astype(part.dtype)
    me = jax.lax.axis_index(over)
    pieces = [_shift(sent, over, by) for by in range(count)]
    ordered = [_pick(pieces, (me - i) % count, axis) for i in range(count)]
    return jnp.concatenate(ordered, axis).astype(part.dtype)


def _scatter(axis: int, over: str, dtype: DTypeLike, _: None, gradient: Array) -> tuple[Array]:
    if over == "fsdp":
        return (jax.lax.psum_scatter(gradient, over, scatter_dimension=axis, tiled=True),)
    count, me = jax.lax.axis_size(over), jax.lax.axis_index(over)
    parts = jnp.split(gradient, count, axis)
    sent = [_pick(parts, (me + by) % count, axis) for by in range(count)]
    return (sum(_shift(part, over, by) for by, part in enumerate(sent)),)  # type: ignore


def _pick(parts: Sequence[Array], place: Array, axis: int) -> Array:
    """The part at a place that differs from device to device."""
    # Of two what was measured, which reads both; of more a slice, which reads one.
    if len(parts) == 2:
        return jax.lax.select_n(place, *parts)
    size = parts[0].shape[axis]
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate(parts, axis), place * size, size, axis)


def _shift(x: Array, over: str, by: int) -> Array:
    """What the device `by` places before this one has; copied without NCCL if within a process."""
    count = jax.lax.axis_size(over)
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.lax.ppermute(x, over, pairs) if by else x


_gather_as.defvjp(lambda *arguments: (_gather_as(*arguments), None), _scatter)


def _is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def gather_shards(tree: Any) -> Any:
    """The tree with whole arrays in place of shards."""
    return jax.tree.map(lambda x: x.gather() if _is_shard(x) else x, tree, is_leaf=_is_shard)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where a model's arrays lie: what a program over its rows must know; hashable.

    Each device runs one device's program on its own rows. It holds parameters whole, or their
    shards, of which it gathers a layer at a time.
    """

    placement: Placement
    specs: tuple[P, ...]  # of each array, in the order of the parameters' leaves, without `tensor`
    dtype: DTypeLike | None = None  # in which parts of float32 matrices travel; None: as they are

    @classmethod
    def of(cls, arrays: Any, placement: Placement, dtype: DTypeLike | None = None) -> "Spread":
        """Of parameters, or of their shardings."""
        ours = [axis for axis in ROW_AXES if placement.mesh.shape[axis] > 1]

        def spec(leaf: Any) -> P:
            place = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
            if not isinstance(place, NamedSharding) or not set(ours) & set(place.spec):
                return P()
            return P(*(axis if axis in ours else None for axis in place.spec))

        return cls(placement, tuple(map(spec, jax.tree.leaves(arrays))), dtype)

    def tree(self, params: Any) -> Any:
        """The specs, as the parameters' tree."""
        return jax.tree.unflatten(jax.tree.structure(params), self.specs)

    def mark(self, params: Any) -> Any:
        """The parameters that a device holds, split ones as `Shard`."""

        def one(leaf: Array, spec: P) -> Any:
            for place, axis in enumerate(spec):
                if axis is not None:
                    return Shard(leaf, place - leaf.ndim, axis, self.dtype)
            return leaf

        return jax.tree.map(one, params, self.tree(params))

    def map_rows(
        self, function: Callable[..., Any], ins: Sequence[Any] = (), outs: Any = ROWS
    ) -> Callable[..., Any]:
        """`function(params, *arrays)`, each device on its own rows.

        `ins` and `outs` are the specs of the arrays and of the result, by default rows first, whose
        number divides evenly.
        """

        def run(params: Any, *arrays: Any) -> Any:
            def local(params: Any, *arrays: Any) -> Any:
                return function(self.mark(params), *arrays)

            specs = self.tree(params), *(ins or [ROWS] * len(arrays))
            return self.placement.map_rows(local, specs, outs)(params, *arrays)

        return run


def map_rows(function: Callable[..., Any], spread: Spread | None, **specs: Any) -> Any:
    """See `Spread.map_rows`; the function itself for a model that is placed nowhere."""
    return function if spread is None else spread.map_rows(function, **specs)


def gather_rows(tree: Any, spread: Spread | None) -> Any:
    """Small results, such as ids, on every device: each process may read them."""
    if spread is None or spread.placement.alone:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(spread.placement.mesh))


def sum_rows(sums: Any, dtype: DTypeLike | None = None, *, ordered: bool = False) -> Any:
    """Of each device's sums those of all rows, within `map_rows`; shards stay where they are.

    A shard's gradient has been summed over its axis when it was scattered. Matrices travel in
    `dtype`, if one is given, at half the bytes in bfloat16. With `ordered` devices are added in
    their order, so that the last bit does not depend on which process holds which.
    """

    def one(x: Any) -> Array:
        part, done = (x.part, x.over) if _is_shard(x) else (x, None)
        several = [a for a in ROW_AXES if a != done and jax.lax.axis_size(a) > 1]
        if not several:
            return part
        sent = part.astype(dtype) if dtype is not None and part.ndim > 1 else part
        if ordered:
            return jnp.sum(jax.lax.all_gather(sent, tuple(several)), axis=0).astype(part.dtype)
        return jax.lax.psum(sent, several).astype(part.dtype)

    return jax.tree.map(one, sums, is_leaf=_is_shard)
