"""A loaded model, teacher or student: pure functions, the arrays they take, and a tokenizer."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int

from kdjax.config import WEIGHTS, refuse_removed_weights
from kdjax.device import sharding
from kdjax.device.placement import Placement, capability
from kdjax.errors import UserError, check_type
from kdjax.models.adapters import Lora, freeze_matrices, join_adapters
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint, open_checkpoint
from kdjax.models.decoder import (
    Compute,
    DecoderFunctions,
    ModelFunctions,
    ModuleFunctions,
    Params,
    functional,
)
from kdjax.models.decoding import (
    AT_ONCE,
    Completion,
    Sampling,
    StepWriter,
    Writer,
    write_answers,
)
from kdjax.models.draft_functions import DraftFunctions
from kdjax.models.drafts import check_same_ids
from kdjax.models.dspark import DSparkFunctions
from kdjax.models.eagle import EagleFunctions
from kdjax.models.loading import load_params, shape_params
from kdjax.models.shards import Spread, gather_shards, map_rows
from kdjax.models.speculation import BlockWriter, DraftWriter, EagleWriter, HeadWriter
from kdjax.models.summary import describe_arrays, make_table
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import Scaled, decode_weight, hold_bits, to_bits, unembed

_log = logging.getLogger("kdjax")

DTYPES = ("bfloat16", "float32", "float16")  # of stored numbers, and of computation
# Tensor cores multiply float8 from Ada (8.9) and Hopper (9.0) on.
_FLOAT8_CAPABILITY = 8.9


@dataclasses.dataclass(frozen=True)
class Model:
    """Pure functions, the parameters that they take, and facts about them.

    Only `logits` computes logits of a full batch: elsewhere hidden states and head are separate.
    The parameters are an argument of a training step, never closed over.

        model = kdjax.load("model.gguf")
        print(model.generate("def f(x):", max_tokens=32)[0].text)
        logits = model.logits([model.tokenizer.encode("def f(x):")])
    """

    functions: ModelFunctions
    params: Params
    vocab_size: int  # rows of the head, padding rows included
    kind: str = ""  # the form of the weights, for a log
    source: str = ""  # where they come from, for a log
    spec: ArchSpec | None = None
    placement: Placement | None = None
    checkpoint: Checkpoint | None = None  # what it was loaded from
    own_tokenizer: Tokenizer | None = None  # in place of the checkpoint's

    @classmethod
    def from_module(cls, module: nnx.Module, tokenizer: Tokenizer | None = None) -> "Model":
        """Any deterministic module with `hidden(tokens, segment_ids, positions)`, `[B, T, D]`, and
        `head_weight()`, `[V, D]`. Raises `UserError` for state that is no `nnx.Param`.
        """
        graph, params, others = nnx.split(module, nnx.Param, ...)
        if leaves := jax.tree.leaves(nnx.to_pure_dict(others)):
            raise UserError(
                f"{type(module).__name__} has {len(leaves)} arrays that are not an nnx.Param; "
                "expected a deterministic module without other state. Make them parameters or "
                "constants."
            )
        functions, pure = ModuleFunctions(graph), nnx.to_pure_dict(params)
        rows = jax.eval_shape(functions.head, pure).shape[0]
        name = type(module).__name__
        return cls(functions, pure, rows, "own module", name, own_tokenizer=tokenizer)

    def __str__(self) -> str:
        size = f"{self.resident_bytes / 1e9:.2f} GB resident, {self.vocab_size:,} head rows"
        return f"{self.name}: {size}"

    def __repr__(self) -> str:
        return f"<kdjax.Model {self}>"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        rows = {"weights": describe_arrays(self.params), "head": f"{self.vocab_size:,} rows"}
        if self.spec is not None:
            spec = self.spec
            rows["family"] = f"{spec.family}, {spec.num_layers} layers, width {spec.hidden_size}"
        return make_table(f"Model: {self.name}", rows)

    @property
    def name(self) -> str:
        """Name in messages: the form of its weights, and their source."""
        return f"{self.kind} {self.source}".strip() or str(self.checkpoint or "this model")

    @property
    def spread(self) -> Spread | None:
        """How its arrays are spread over devices; None for a custom module, without a placement."""
        return None if self.placement is None else Spread.of(self.params, self.placement)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters, or of their shapes, on all devices together."""
        return sharding.count_bytes(self.params)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer given, or the checkpoint's, read once needed; None without both."""
        if self.own_tokenizer is None and self.checkpoint is not None:
            return self.checkpoint.tokenizer
        return self.own_tokenizer

    def _known_tokenizer(self) -> Tokenizer | None:
        try:
            return self.tokenizer
        except UserError:  # the file has none
            return None

    @property
    def real_vocab(self) -> int:
        """Number of ids with a token; all rows of the head if no tokenizer is known."""
        tokenizer = self._known_tokenizer()
        return self.vocab_size if tokenizer is None else min(tokenizer.vocab_size, self.vocab_size)

    def replace(self, **changes: Any) -> "Model":
        """This model with other fields, such as `params`."""
        return dataclasses.replace(self, **changes)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a float32 model multiplies in float32: a GPU would use TF32, 10 bits."""
        if not isinstance(self.functions, DecoderFunctions):
            return contextlib.nullcontext()
        exact = jnp.dtype(self.functions.compute.dtype) == jnp.float32
        return jax.default_matmul_precision("highest" if exact else "default")

    def logits(
        self,
        tokens: ArrayLike | Sequence[Any],
        segment_ids: Int[ArrayLike, "B T"] | None = None,
        positions: Int[ArrayLike, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """float32 logits of every position over the `real_vocab` ids: for small inputs.

        `tokens` are whole numbers `[B, T]`, in lists or arrays. A row is one segment, 1, at
        positions 0 to T - 1, unless others are given. Raises `UserError` for other shapes or ids.
        """
        if not isinstance(tokens, Tracer):
            tokens = self._check_tokens(tokens)
        tokens = jnp.asarray(tokens, jnp.int32)
        columns = _fill_columns(tokens, segment_ids, positions)
        rows = tokens.shape[0]
        if self.placement is not None:  # repeats the last row until it divides
            more = -rows % sharding.row_shards(self.placement.mesh)
            columns = [jnp.pad(x, ((0, more), (0, 0)), mode="edge") for x in columns]
        with self.precision():
            logits = _compute_logits(self.functions, self.spread, self.params, *columns)
        return logits[:rows, :, : self.real_vocab]

    def _check_tokens(self, tokens: Any) -> np.ndarray:
        try:
            array = np.asarray(tokens)
        except ValueError:  # rows of different lengths
            array = np.zeros(())
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"found tokens of shape {array.shape} and type {array.dtype}; expected whole "
                "numbers [rows, positions], rows of equal length. Put a single row in brackets."
            )
        # Rows of the embedding; the head may have fewer.
        rows = np.inf if self.spec is None else self.spec.vocab_size
        if array.size and not 0 <= array.min() <= array.max() < rows:
            raise UserError(
                f"found ids from {array.min()} to {array.max()}; expected 0 to {rows - 1}. "
                "Encode the text with the model's own tokenizer."
            )
        return array

    def hidden_states(
        self, batches: Iterable[Mapping[str, Any]], *, drafts: int = 0
    ) -> Iterator[Float[Array, "B ... D"]]:
        """Yields the hidden states of batches of host arrays, whose rows are split over the mesh.

        `[B, T, D]`; with `drafts`, for a block or a head that drafts, what `draft_runs` returns.
        """
        options = None
        if self.placement is not None:
            options = sharding.compiler_options(self.placement.mesh)
        function: Any = self.functions.hidden
        if drafts:
            assert isinstance(self.functions, DraftFunctions | DSparkFunctions | EagleFunctions)
            function = functools.partial(self.functions.draft_runs, drafts=drafts)
        hidden = jax.jit(map_rows(function, self.spread), compiler_options=options)
        for batch in batches:
            columns = [batch[name] for name in ("tokens", "segment_ids", "positions")]
            if self.placement is not None:
                columns = jax.device_put(columns, sharding.batch_sharding(self.placement.mesh))
            with self.precision():
                states = hidden(self.params, *columns)
            yield states

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        draft: "Model | None" = None,
        draft_tokens: int = 5,
        draft_p_min: float = 0.0,
        numbers: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        batch_size: int | None = None,
        room: int = 0,
        on_text: Callable[[int, str], None] | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Continues prompts, texts or token ids: one `Completion` each, in order.

        `settings` are the fields of `Sampling`, such as `max_tokens=64, temperature=0.8`, in place
        of `sampling`; without either, the ends of text and of a turn end a completion.
        `batch_size` rows (default: at most 32) are written at once; see `decoding.write_answers`
        for `numbers`, `limits`, `room` and `on_text`. A `draft`, a smaller model of the same
        vocabulary on the same devices, proposes `draft_tokens` ids a pass, a head only those before
        the first of less confidence than `draft_p_min`: fewer passes write equal completions
        (`models.speculation`). Raises `UserError` for a model without a decoder, for ids that no
        token has, for too many positions, and for a draft with another vocabulary.
        """
        writer: Writer = self.as_writer("generate")
        params: Any = self.params
        if draft is not None:
            writer, params = self._pair_with(draft, draft_tokens, draft_p_min)
        tokenizer = self._known_tokenizer()
        if isinstance(prompts, str):
            prompts = [prompts]
        ids = [self._encode(prompt) for prompt in prompts]
        if sampling is None:
            if tokenizer is not None:
                settings = {"stop_ids": tokenizer.stop_ids} | settings
            sampling = Sampling(**settings)
        with self.precision():
            return write_answers(
                writer,
                params,
                ids,
                sampling,
                tokenizer=tokenizer,
                numbers=numbers,
                limits=limits,
                batch_size=batch_size or min(len(ids), AT_ONCE),
                room=room,
                on_text=on_text,
            )

    def _pair_with(
        self, draft: "Model", draft_tokens: int, draft_p_min: float
    ) -> tuple[Writer, tuple[Params, Params]]:
        """A writer for which `draft` drafts, and its parameters."""
        check_model(draft, "draft")
        check_same_ids(self._known_tokenizer(), draft._known_tokenizer())
        params = self.params, draft.params
        sides = self.as_writer("generate"), draft.as_writer("draft")
        _, kind = _find_part(draft.functions) or ("", DraftWriter)
        return kind.of(*sides, params, draft_tokens).offer_from(draft_p_min), params

    def as_drafter(self, drafts: int) -> DraftWriter:
        """Functions that draft this many tokens a pass with a part, for the model that it is of."""
        writer, found = self.as_writer("draft"), _find_part(self.functions)
        assert found is not None
        return found[1].of(writer, writer, (self.params, self.params), drafts)

    def as_writer(self, verb: str) -> StepWriter:
        """Functions that write an id a step; raises `UserError` for a model without a decoder."""
        if not isinstance(self.functions, DecoderFunctions):
            raise UserError(f"{self}: has no decoder to {verb} with.")
        if verb != "draft" and (found := _find_part(self.functions)):
            part, _ = found
            raise UserError(
                f"{self.name}: found a {part} that drafts; expected a model to {verb} with. Give "
                f"the {part} to the model that it belongs to: model.generate(prompts, "
                f"draft={part})."
            )
        return StepWriter(self.functions, self.real_vocab, self.spread)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise UserError(f"{self}: has no tokenizer for {prompt!r}; give token ids.")
        return self.tokenizer.open_text(self.tokenizer.encode(prompt))


def check_model(value: Any, name: str = "model") -> None:
    """Raises `UserError` for an argument that is no `Model`, such as a file's path or a state."""
    wanted = "a kdjax.Model, as kdjax.load(PATH) and model.replace(params=...) return it"
    check_type(name, value, Model, wanted)


# Functions of a part of a model that drafts for it: its name, and how answers are written with it.
_PARTS: Mapping[type, tuple[str, type[DraftWriter]]] = {
    DraftFunctions: ("block", BlockWriter),
    DSparkFunctions: ("head", HeadWriter),
    EagleFunctions: ("head", EagleWriter),
}


def _find_part(functions: ModelFunctions) -> tuple[str, type[DraftWriter]] | None:
    """The entry of `_PARTS` for these functions; None for a model that writes."""
    return next((x for kind, x in _PARTS.items() if isinstance(functions, kind)), None)


def _fill_columns(tokens: Array, segment_ids: Any, positions: Any) -> tuple[Array, Array, Array]:
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    if positions is None:
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(at, tokens.shape)
    return tokens, jnp.asarray(segment_ids, jnp.int32), jnp.asarray(positions, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute_logits(
    functions: ModelFunctions, spread: Spread | None, params: Params, *columns: Array
) -> Array:
    def compute(params: Params, *columns: Array) -> Array:
        hidden = functions.hidden(params, *columns)
        return unembed(hidden, functions.head(params).astype(hidden.dtype))

    return map_rows(compute, spread)(params, *columns)


def load(
    path: str | os.PathLike[str],
    *,
    weights: str = "dense",
    dtype: str = "bfloat16",
    compute_dtype: str | None = None,
    tokenizer: str = "",
    base: str = "",
    max_segments: int = 32,
    devices: Sequence[Any] | None = None,
) -> Model:
    """Opens and loads a model: a GGUF, .apr or safetensors file, a folder, or a run's workdir.

    `hf:ORG/REPO[/FILE]` is on the Hugging Face Hub, and downloaded if it is not in the cache.

    `weights="dense"` stores every tensor as numbers of `dtype`. "packed" stores matrices in the
    file's blocks, decoded a layer at a time to the numbers of "dense", bit for bit. "float8" stores
    matrices as float8_e4m3fn with a float32 scale for each row, for float8 products. Embeddings,
    norms and biases have `dtype`, activations `compute_dtype` (default: `dtype`).

    Rows of a batch are split over `devices` (default: only the first); parameters are on each.
    `tokenizer` is another file or folder to take it from. `max_segments` bounds the segments of a
    row. Raises `UserError` for a path that is missing, damaged or of an unknown architecture, for
    another form of weights, and for float8 on a GPU without it.

    A folder that PEFT saved loads as its base, at `base` or the path in the folder, with the
    adapter; so does a run that trained an adapter.

        teacher = kdjax.load("teacher.gguf", weights="packed")
        student = kdjax.load("student.gguf", dtype="float32")
    """
    devices = jax.local_devices()[:1] if devices is None else list(devices)
    return load_model(
        open_checkpoint(path, tokenizer=tokenizer, student=base),
        weights=weights,
        dtype=dtype,
        compute_dtype=compute_dtype,
        max_segments=max_segments,
        placement=Placement.on(sharding.make_mesh(-1, 1, 1, devices)),
    )


def _check_form(weights: str, **dtypes: DTypeLike) -> None:
    """Raises `UserError` for an unknown form of weights, or an unknown dtype."""
    refuse_removed_weights(weights)
    if weights not in WEIGHTS:
        raise UserError(f"found weights={weights!r}; expected one of {', '.join(WEIGHTS)}.")
    for field, given in dtypes.items():
        if all(given != name and given != jnp.dtype(name) for name in DTYPES):
            raise UserError(f"found {field}={given!r}; expected one of {', '.join(DTYPES)}.")


def load_model(
    checkpoint: Checkpoint,
    *,
    placement: Placement,
    weights: str = "dense",
    dtype: DTypeLike = "bfloat16",
    compute_dtype: DTypeLike | None = None,
    max_segments: int = 1,
) -> Model:
    """Reads the weights onto the placement's mesh.

    Takes the arguments of `load`. Raises `UserError` for another form of weights, for float8 on
    a GPU without it, and for a damaged file.
    """
    _check_form(weights, dtype=dtype, compute_dtype=compute_dtype or dtype)
    if checkpoint.adapters is not None:
        settings: dict[str, Any] = dict(weights=weights, dtype=dtype, compute_dtype=compute_dtype)
        settings |= dict(placement=placement, max_segments=max_segments)
        base = load_model(checkpoint.base, **settings)
        model = base.replace(checkpoint=checkpoint, source=str(checkpoint))
        return attach_adapters(model, checkpoint.adapters.lora, checkpoint.adapters.read_tree())
    if checkpoint.whole_step is not None and weights != "dense":
        raise UserError(
            f"{checkpoint}: found weights={weights} for a saved step, which is dense; expected "
            "dense. Leave it out; adapters on a saved step need student.lora.weights=dense."
        )
    compute = Compute(
        dtype=jnp.dtype(compute_dtype or dtype),
        param_dtype=jnp.dtype(dtype),
        max_segments=max_segments,
        placement=placement,
    )
    if weights == "float8":
        check_float8(placement.mesh.devices.flat[0])
        if placement.platform == "cpu":
            _log.warning("float8 products are emulated on the CPU: equal numbers, slowly")
    functions, abstract = functional(checkpoint.spec, compute)
    params = _read_params(checkpoint, abstract, placement, weights)
    kind = f"{weights} ({jnp.dtype(dtype).name})"
    rows = checkpoint.spec.vocab_size
    spec, source = checkpoint.spec, checkpoint.name
    if checkpoint.saved is not None:
        source = str(checkpoint.saved.workdir)
    return Model(functions, params, rows, kind, source, spec, placement, checkpoint)


def attach_adapters(model: Model, lora: Lora, adapters: Params) -> Model:
    """The model with float32 adapters, a tree as of `draw_adapters`, on its devices.

    The adapters may be shapes.
    """
    assert model.spec is not None
    shapes = isinstance(jax.tree.leaves(adapters)[0], jax.ShapeDtypeStruct)
    if model.placement is not None and not shapes:
        adapters = jax.device_put(adapters, sharding.replicated(model.placement.mesh))
    frozen = freeze_matrices(model.params, model.spec, lora.scale)
    kind = f"{model.kind} with adapters of rank {lora.rank}".strip()
    return model.replace(params=join_adapters(frozen, adapters), kind=kind)


def _read_params(
    checkpoint: Checkpoint, abstract: Params, placement: Placement, matrices: str = "dense"
) -> Params:
    """Reads parameters as programs take them, or, where the placement says so, their shapes."""
    sources = checkpoint.table, checkpoint.spec, abstract, placement.mesh
    if not placement.shapes:
        return _prepare(load_params(*sources, matrices=matrices), placement)
    prepare = functools.partial(_prepare, placement=placement)
    return jax.eval_shape(prepare, shape_params(*sources, matrices=matrices))


def _prepare(params: Params, placement: Placement) -> Params:
    """Arrays as a scan slices them without copies: bits on a CPU; products as placed."""
    if placement.platform == "cpu":
        params = jax.tree.map(hold_bits, params)
    return jax.tree.map(
        lambda weight: (
            dataclasses.replace(weight, kernels=placement.kernels)
            if isinstance(weight, Scaled)
            else weight
        ),
        params,
        is_leaf=lambda weight: isinstance(weight, Scaled),
    )


def cast_params(model: Model, params: Params) -> Params:
    """A copy of `params`, masters of `model`, in its compute dtype, on the devices."""
    assert isinstance(model.functions, DecoderFunctions) and model.placement is not None
    if Lora.of_params(params):  # whose products read the base as it is
        return params
    dtype, on_cpu = jnp.dtype(model.functions.compute.dtype), model.placement.platform == "cpu"
    if all(x.dtype == dtype for x in jax.tree.leaves(params)):
        return params
    return _cast(params, dtype, on_cpu)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(params: Params, dtype: DTypeLike, as_bits: bool) -> Params:
    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    return jax.tree.map(to_bits, cast) if as_bits else cast


def check_float8(device: Any) -> None:
    """Raises `UserError` for a GPU without float8 products; a CPU emulates them."""
    if device.platform != "cpu" and capability(device) < _FLOAT8_CAPABILITY:
        shown = getattr(device, "compute_capability", "unknown")
        raise UserError(
            f"found a {device.device_kind} of compute capability {shown}; expected an NVIDIA GPU "
            f"of {_FLOAT8_CAPABILITY} or more (Ada, Hopper and later) for float8 products. "
            "Keep the weights dense or packed: teacher.weights=auto."
        )


def narrow_head(model: Model, vocab_size: int) -> Model:
    """The model over the first `vocab_size` ids: other rows of the head are cut off, once.

    Cutting before the softmax renormalises the probabilities over the ids that are left. Raises
    `UserError` for a size of 0 or above the number of rows.
    """
    rows = model.vocab_size
    if not 0 < vocab_size <= rows:
        raise UserError(
            f"{model.source}: found a teacher of {rows:,} rows to cut to {vocab_size:,}; "
            f"expected 1 to {rows:,}. Choose a teacher of at least the student's vocabulary."
        )
    if vocab_size == rows or not model.params:  # without a head there is nothing to cut
        return model
    # A tied head is the embedding; ids beyond the cut have no token and are never looked up.
    name = "head" if "head" in model.params else "embed"
    # Packed rows too: no block crosses from one row to the next.
    cut = functools.partial(jax.tree.map, jax.jit(lambda x: x[:vocab_size]))
    if model.placement is not None and model.placement.shapes:
        head = jax.eval_shape(cut, model.params[name])
    else:
        head = jax.block_until_ready(cut(model.params[name]))
    params = model.params | {name: head}
    return model.replace(params=params, vocab_size=vocab_size)


@dataclasses.dataclass(frozen=True)
class HeadFunctions:
    """The functions of a teacher whose hidden states come with the batch."""

    def hidden(self, params: Params, tokens: Array, segment_ids: Array, positions: Array) -> Array:
        raise TypeError("a cached teacher does not run: its hidden states come with the batch")

    def head(self, params: Params) -> Array:
        return decode_weight(gather_shards(next(iter(params.values()))))

    stored_head = head


def load_unembedding(
    checkpoint: Checkpoint, compute: Compute, kind: str, *, empty: bool = False
) -> Model:
    """Only the head of a model, dense; with `empty` no arrays. `kind` is for a log."""
    assert compute.placement is not None
    params: Params = {}
    if not empty:
        name = checkpoint.spec.head
        shapes = {name: functional(checkpoint.spec, compute)[1][name]}
        params = _read_params(checkpoint, shapes, compute.placement)
    return Model(
        HeadFunctions(),
        params,
        checkpoint.spec.vocab_size,
        kind,
        checkpoint.name,
        checkpoint.spec,
        compute.placement,
        checkpoint,
    )
