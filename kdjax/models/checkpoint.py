"""A model that is opened and not yet loaded: a file, a folder, or a saved step of a run."""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.config import WEIGHTS, read_weights, split_layers
from kdjax.errors import MissingFileError, UserError, suggest_path
from kdjax.formats import (
    LazyTensor,
    TensorTable,
    content_hash,
    open_shapes,
    open_table,
    rename_tensors,
)
from kdjax.formats.blocks import decode
from kdjax.formats.files import load_json
from kdjax.formats.safetensors import ADAPTER_CONFIG
from kdjax.formats.saved import (
    BLOCK,
    CHECKPOINTS,
    HEADS,
    LORA,
    RECEIPT,
    SavedTable,
    find_best,
    find_head,
    read_receipt,
    resolve_path,
    saved_run,
    saved_steps,
)
from kdjax.hub import MODEL, PREFIX, TOKENIZER, fetch_path, origin
from kdjax.models.adapters import (
    SavedSum,
    StoredAdapters,
    merge_adapters,
    open_peft,
    saved_adapters,
)
from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES, find_gguf_family
from kdjax.models.loading import (
    count_parameters,
    has_tied_head,
    is_gguf,
    is_saved,
    split_fused,
    tensor_names,
)
from kdjax.models.names import Layout, layout_of, name_of, renumber
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import (
    Tokenizer,
    TokenizerFiles,
    find_tokenizer_files,
    load_tokenizer,
)

_log = logging.getLogger("kdjax")
NEWEST = "newest"  # in place of a step's number
_DTYPES = ("bfloat16", "float32")
_NAME_BASE = "--student=PATH, or base=PATH of kdjax.load"
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of the Hugging Face Hub


@dataclasses.dataclass(frozen=True)
class ModelArgument:
    """PATH[@dense|packed|float8[:bfloat16|float32]]: a model of a command line."""

    path: str
    weights: str = "dense"
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> "ModelArgument":
        """Parses a text, all of it a path if that exists; raises `UserError` for unknown forms."""
        path, at, form = text.rpartition("@")
        word, _, dtype = form.partition(":")
        weights = read_weights(word)
        revision = text.startswith(PREFIX) and weights not in WEIGHTS
        if not at or "/" in form or revision or os.path.lexists(text):
            return cls(text)
        if weights not in WEIGHTS or (dtype or _DTYPES[0]) not in _DTYPES:
            raise UserError(
                f"{text!r}: found the form {form!r}; expected {' or '.join(WEIGHTS)}, then "
                f"nothing or : and {' or '.join(_DTYPES)}, such as {path}@packed:bfloat16."
            )
        return cls(path, weights, dtype or _DTYPES[0])

    def __str__(self) -> str:
        return f"{Path(self.path).name}@{self.weights}:{self.dtype}"


@dataclasses.dataclass(frozen=True)
class Saved:
    """The run and the step of a checkpoint, and how that run began."""

    workdir: Path
    step: int
    init: str  # "checkpoint" or "random"
    seed: int
    student: "Checkpoint"  # the run's initial student: its header describes the step's tensors too


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model of which only the header was read; `open_checkpoint` makes one."""

    table: TensorTable
    spec: ArchSpec
    tokenizer_path: str = ""  # another file or folder that holds its tokenizer
    saved: Saved | None = None
    adapters: StoredAdapters | None = None  # the table adds them to its base

    def __str__(self) -> str:
        if self.saved is not None:
            return f"{self.saved.workdir}, step {self.saved.step}"
        if self.adapters is not None:
            return f"{self.adapters.name} on {self.name}"
        return self.name

    @property
    def name(self) -> str:
        """The first file's name, after its folder's for safetensors, which all have one name."""
        file = self.table.paths[0]
        if file.suffix != ".safetensors":
            return file.name
        folder = file.absolute().parent
        if (cached := origin(folder)) is not None:  # the folder has the name of a commit
            return cached.partition("@")[0]
        return f"{folder.name}/{file.name}"

    @property
    def path(self) -> Path:
        """The step's folder, or the first file of the model; messages name it."""
        if self.saved is not None:
            return self.saved.workdir / CHECKPOINTS / str(self.saved.step)
        return self.table.paths[0]

    @property
    def whole_step(self) -> Saved | None:
        """The saved step of this table; None for files, and for adapters or a block on files."""
        return self.saved if isinstance(self.table, SavedTable) else None

    @property
    def base(self) -> "Checkpoint":
        """The model without its adapters; itself if it has none."""
        if self.adapters is None or self.table.base is None:
            return self
        return dataclasses.replace(self, table=self.table.base, saved=None, adapters=None)

    @property
    def header(self) -> TensorTable:
        """The table whose metadata describes the model: for a step, that of the run's student."""
        return self.table if self.saved is None else self.saved.student.table

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read at first access. Raises `UserError` if there is none.

        Of a run, the token that ended its documents ends answers too (`data.end_of_document`).
        """
        tokenizer = load_tokenizer(*self._holds_tokenizer)
        end = "" if self.saved is None else _end_of_documents(self.saved.workdir)
        if not end or end not in tokenizer.tokens:
            return tokenizer
        ends = tokenizer.named_ends | {tokenizer.tokens.index(end)}
        return dataclasses.replace(tokenizer, named_ends=ends)

    @property
    def tokenizer_files(self) -> TokenizerFiles:
        """The files of the tokenizer, for an export that copies them."""
        return find_tokenizer_files(*self._holds_tokenizer)

    @property
    def _holds_tokenizer(self) -> tuple[str | Path, TensorTable | None]:
        """The file or folder of the tokenizer, and its table if the model's file has it."""
        if self.tokenizer_path:
            return self.tokenizer_path, None
        return self.header.paths[0], self.header

    def check_tokens(self, least: float) -> list[tuple[str, str]]:
        """Returns the tokens in its header, each with the same id's of the tokenizer that is read.

        Raises `UserError` if a smaller share than `least` of them is equal; either list may be
        padded.
        """
        listed = self.header.metadata.get("tokenizer.ggml.tokens", ())
        pairs = list(zip(listed, self.tokenizer.tokens, strict=False))
        differing = [i for i, (own, read) in enumerate(pairs) if own != read]
        if len(differing) > (1 - least) * len(pairs):
            own, read = pairs[differing[0]]
            raise UserError(
                f"{self}: found {own!r} at id {differing[0]} of its vocabulary and {read!r} in "
                f"{self.tokenizer_path}; expected one vocabulary. Name the model's tokenizer."
            )
        return pairs

    def fall_back(self, tokenizer: str) -> "Checkpoint":
        """Returns the checkpoint, with the tokenizer at `tokenizer` if its own cannot be read.

        The tokens in its header must equal the other's, up to the shorter list. Raises `UserError`
        if they differ, and if there is no other.
        """
        try:
            self.tokenizer  # noqa: B018
            return self
        except UserError:
            if not tokenizer:
                raise
        other = dataclasses.replace(self, tokenizer_path=tokenizer)
        pairs = other.check_tokens(1.0)
        proof = f"all {len(pairs):,} tokens agree" if pairs else "it lists no tokens to compare"
        _log.warning("%s: tokenizer not read; %s replaces it: %s", self, tokenizer, proof)
        return other

    @functools.cached_property
    def names(self) -> dict[tuple[str, ...], list[str]]:
        """See `loading.tensor_names`."""
        return tensor_names(self.table, self.spec)

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the files' bytes, in hex; reads all of them at first access."""
        return content_hash(self.table)

    def read_unembedding(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the unembedding, float32 `[N, D]`, of some `ids`."""
        (name,) = self.names[self.spec.head,]
        raw = self.table.raw(name)[ids]
        return np.asarray(decode(raw, self.table.info(name).dtype))

    def describe(self) -> str:
        """One line for a log."""
        spec, head = self.spec, "tied" if self.spec.tied else "untied"
        cut = ", of which not all is here" if self.table.cut else ""
        return (
            f"{self}: {spec.family}, {spec.num_layers} layers, width {spec.hidden_size}, "
            f"{spec.vocab_size:,} rows, {head}, {count_parameters(spec) / 1e9:.3f} B parameters"
            f"{cut}"
        )


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    tokenizer: str = "",
    student: str = "",
    shapes: bool = False,
    whole: bool = True,
) -> Checkpoint:
    """Opens a GGUF, .apr or safetensors file, a Hugging Face folder, or a run's workdir or step.

    An `hf:` path of these is downloaded first (`kdjax.hub`). A folder of PEFT's with an adapter is
    the model that it names as its base, or `student`, with the adapter.

    A folder with `checkpoints/` is a workdir, of which the best step counts, as the run judged it
    by held-out text; `checkpoints/newest` in it is the newest. A step has neither
    architecture nor tokenizer: they come from the student that its run began with, which is
    `student` or what the run's receipt names. `tokenizer` names another file or folder for the
    tokenizer alone; with `shapes` a folder may hold its `config.json` and no weights, with
    `whole=False` a file no more than its header. Reads headers only. Raises `MissingFileError` if
    there is nothing at `path`, `UserError` for what cannot be understood, and for a `student`
    beside a model that is whole.
    """
    path = Path(fetch_path(path, TOKENIZER if shapes else MODEL))
    if (path / ADAPTER_CONFIG).is_file() and not (path / CHECKPOINTS).is_dir():
        return _open_adapter(path, student, tokenizer, whole=whole)
    if (path / CHECKPOINTS).is_dir():
        return open_step(path, student=student, tokenizer=tokenizer)
    if path.parent.name == CHECKPOINTS and (path.name.isdigit() or path.name == NEWEST):
        workdir, step = path.parent.parent, path.name if path.name == NEWEST else int(path.name)
        return open_step(workdir, step, student=student, tokenizer=tokenizer)
    if student:
        raise UserError(
            f"{path}: found {student!r} named as its student or base, and a model that needs none; "
            "expected a run or a folder of PEFT's. Leave it out."
        )
    table = take_text((open_shapes if shapes else open_table)(path, whole=whole))
    spec = spec_from_table(table)
    return Checkpoint(split_fused(table, spec), spec, tokenizer)


def _adapt(base: Checkpoint, adapters: StoredAdapters) -> Checkpoint:
    """Returns the model with these adapters in place of any others."""
    table = merge_adapters(base.base.table, base.spec, adapters)
    return dataclasses.replace(base, table=table, adapters=adapters)


def read_base(folder: Path) -> str:
    """The base that a PEFT folder names, "" without; raises `UserError` for a damaged config."""
    named = load_json(folder / ADAPTER_CONFIG, "a file").get("base_model_name_or_path")
    return named if isinstance(named, str) else ""


def _find_base(folder: Path) -> tuple[str | None, Path | None]:
    """The base that a PEFT folder names, and its place on this machine."""
    named = read_base(folder)
    if not named:
        return None, None
    there = (path for path in (Path(named), folder / named) if os.path.exists(path))
    return named, next((path for path in there if not path.samefile(folder)), None)


def _refuse_circle(folder: Path) -> None:
    """Raises `UserError` if adapters name each other as their bases."""
    seen, at = [folder.resolve()], folder
    while (at / ADAPTER_CONFIG).is_file() and (base := _find_base(at)[1]) is not None:
        if base.resolve() in seen:
            raise UserError(
                f"{folder}: found adapters that name each other as bases ({at} names {base}); "
                "expected the model that it was trained on. Name it: kdjax.load(..., base=PATH), "
                f"or correct base_model_name_or_path of {ADAPTER_CONFIG}."
            )
        seen.append(base.resolve())
        at = base


def _open_adapter(folder: Path, base: str, tokenizer: str, *, whole: bool) -> Checkpoint:
    """Opens a PEFT folder on its base."""
    named = base or None
    if not base:
        _refuse_circle(folder)
        named, found = _find_base(folder)
        base = str(found) if found else f"{PREFIX}{named}" if _REPO.fullmatch(named or "") else ""
    if not base:
        raise MissingFileError(
            f"{folder}: found an adapter whose base, {named!r}, is not here; expected the model "
            "that it was trained on. Name it: kdjax.load(..., base=PATH), or put its path in "
            f"base_model_name_or_path of {ADAPTER_CONFIG}."
        )
    checkpoint = open_checkpoint(base, tokenizer=tokenizer, whole=whole)
    return _adapt(checkpoint, open_peft(folder, checkpoint.spec))


def cut_layers(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """Returns the model with these layers only, and its embedding and head; () keeps all layers.

    Raises `UserError` for a layer that it does not have.
    """
    if not layers:
        return checkpoint
    if checkpoint.adapters is not None:
        raise UserError(
            f"{checkpoint}: found an adapter, which covers all layers, and some layers to keep; "
            "expected one of them. Merge it first (kdjax export), or leave out student.layers."
        )
    spec = checkpoint.spec
    if max(layers) >= spec.num_layers:
        raise UserError(
            f"{checkpoint}: found no layer {max(layers)} to keep; expected 0 to "
            f"{spec.num_layers - 1}. Correct student.layers."
        )
    checkpoint = drop_block(checkpoint)
    spec = dataclasses.replace(checkpoint.spec, layers=tuple(spec.layers[i] for i in layers))
    table = rename_tensors(checkpoint.table, lambda name: renumber(name, layers))
    return dataclasses.replace(checkpoint, table=table, spec=spec)


def drop_block(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the model without its drafting block, if it has one."""
    spec, table = checkpoint.spec, checkpoint.table
    if not spec.drafts or checkpoint.whole_step is not None:
        return checkpoint
    block = f"blk.{spec.num_layers}.", "mtp."
    part = rename_tensors(table, lambda name: None if name.startswith(block) else name)
    return dataclasses.replace(checkpoint, table=part, spec=dataclasses.replace(spec, drafts=0))


def _add_block(base: TensorTable, spec: ArchSpec, saved: SavedTable) -> TensorTable:
    """Adds the block that drafts of a saved step, float32, named as in the base's files.

    `spec` has the block, and the base has none. Rows are in the file's own order.
    """
    gguf, apart = is_gguf(base), not is_saved(base)

    def read(stem: str, shape: tuple[int, ...], layout: Layout) -> np.ndarray:
        numbers = saved.array(stem).reshape(shape)
        numbers = np.ascontiguousarray(layout.write_order(numbers + np.float32(layout.offset)))
        return numbers.view(np.uint8).reshape(*numbers.shape[:-1], -1)

    tensors = dict(base.tensors)
    for stem in saved:
        path, info, layout = tuple(stem.split("/")), saved.info(stem), Layout()
        if apart:
            row, layout = name_of(path, spec), layout_of(path, spec, gguf=gguf)
            name = (row.gguf if gguf else row.hf).format(i=spec.num_layers)
            info = info._replace(name=name, shape=layout.file_shape(info.shape[1:]))
        tensors[info.name] = LazyTensor(info, functools.partial(read, stem, info.shape, layout))
    return base.replace(tensors, paths=(*base.paths, *saved.paths), base=base)


def take_text(table: TensorTable) -> TensorTable:
    """Selects the text model of files that hold more; logs what is left out.

    A multimodal folder has a model of images as well. The drafting block after the last layer stays
    if there is one and it uses the model's embedding and head.
    """
    if "general.architecture" in table.metadata:
        part = _take_trunk(table)
    else:
        part = _take_language_model(table)
    left = len(table) - len(part)
    if left:
        _log.warning(
            "%s: %d tensors of %d are left out: they see images or draft by other parts than one "
            "block, and kdjax reads the text model alone",
            table.paths[0].name,
            left,
            len(table),
        )
    return part


def _take_language_model(table: TensorTable) -> TensorTable:
    outer = table.metadata
    family = next((f for f in FAMILIES.values() if f.multimodal == outer.get("model_type")), None)
    text = outer.get("text_config")
    if family is None or not family.multimodal:
        family = FAMILIES.get(str(outer.get("model_type")))
        if family is None or not family.multimodal:
            return table
        text = outer
    if not isinstance(text, Mapping):
        raise UserError(
            f"{table.paths[0].parent}: found a {family.multimodal} config.json without a "
            "text_config; expected the entries of its text model there. Download the folder again."
        )

    drafts = text.get(told := "mtp_num_hidden_layers")
    kept = drafts == 1 and "mtp.norm.weight" in table and "mtp.embed_tokens.weight" not in table
    left = ("model.visual.", "model.mtp.", *(() if kept else ("mtp.",)))

    def rename(name: str) -> str | None:
        if name.startswith(left):
            return None
        return name.replace("model.language_model.", "model.", 1)

    tied = "tie_word_embeddings"
    metadata = {**text, "model_type": family.name, "architectures": [family.hf_architecture]}
    metadata |= {told: 0} if drafts and not kept else {}
    metadata |= {tied: outer[tied]} if tied in outer else {}
    return rename_tensors(table, rename, metadata)


def _take_trunk(table: TensorTable) -> TensorTable:
    arch = table.metadata["general.architecture"]
    family = find_gguf_family(arch, table.metadata)
    names = [f"{arch}.{key}" for key in ("nextn_predict_layers", "block_count")]
    drafts, blocks = (table.metadata.get(name, 0) for name in names)
    whole = type(drafts) is int and type(blocks) is int
    if family is None or "drafts" not in family.fields or not (whole and 0 < drafts < blocks):
        return table
    block, own = f"blk.{blocks - 1}.nextn", ("embed_tokens", "shared_head_head")
    parts = {part: f"{block}.{part}.weight" in table for part in (*own, "shared_head_norm")}
    if drafts == 1 and parts.pop("shared_head_norm") and not any(parts.values()):
        return table
    trunk = range(blocks - drafts)
    metadata = {k: v for k, v in table.metadata.items() if k != names[0]}
    metadata[names[1]] = len(trunk)
    if (listed := metadata.get(name := f"{arch}.attention.recurrent_layers")) is not None:
        metadata[name] = listed[: len(trunk)]
    return rename_tensors(table, lambda name: renumber(name, trunk), metadata)


def open_step(
    workdir: Path, step: int | str | None = None, *, student: str = "", tokenizer: str = ""
) -> Checkpoint:
    """Opens a run's saved step, by default the best, or `NEWEST`; otherwise as `open_checkpoint`.

    Raises `MissingFileError` for a workdir or step that is not there.
    """
    if not workdir.is_dir():
        raise MissingFileError(
            f"{workdir}: no such folder; expected the workdir of a run.{suggest_path(workdir)}"
        )
    steps = saved_steps(workdir)
    if not steps:
        raise MissingFileError(
            f"{workdir} holds no complete checkpoint; expected some under {workdir}/checkpoints. "
            "Name the workdir of a run that has saved."
        )
    step = _find_step(workdir, steps[-1]) if step is None else step
    step = steps[-1] if step == NEWEST else int(step)
    if step not in steps:
        raise MissingFileError(
            f"found no step {step} in {workdir}; expected one of {', '.join(map(str, steps))}."
        )
    identity = saved_run(workdir, step).get("identity", {"own.student": ""})
    if "own.student" in identity:
        raise UserError(
            f"{workdir} holds the state of a loop or a module of your own, whose architecture no "
            "file says; expected a run of kdjax train. Make the model in Python; its parameters "
            "are those of kdjax.formats.saved.SavedTable(workdir, step).read_tree()."
        )
    student, tokenizer = run_sources(workdir, student, tokenizer)
    table = SavedTable(workdir, step)
    # On a base, without which it is nothing.
    beside = any(kind in table.form for kind in (LORA, BLOCK, *HEADS))
    source = open_checkpoint(student, tokenizer=tokenizer, shapes=not beside)
    if beside:
        return _open_step_beside(table, workdir, step, source, identity)
    source = cut_layers(source, split_layers(identity.get("student.layers", "")))
    # The run may have tied a head that the student's file stores twice, or untied one.
    drafts = int("mtp/norm/weight" in table)
    spec = dataclasses.replace(source.spec, tied="head" not in table, drafts=drafts)
    saved = Saved(workdir, step, identity["student.init"], int(identity["train.seed"]), source)
    return Checkpoint(table, spec, source.tokenizer_path, saved)


def _open_step_beside(
    table: SavedTable, workdir: Path, step: int, source: Checkpoint, identity: Mapping[str, Any]
) -> Checkpoint:
    """Opens a run's saved adapters, or its drafting block, on the base that it began with.

    A head is no part of the model that it drafts for: its step opens as that model.

    Raises `UserError` for another base.
    """
    if source.sha256 != identity["student.sha256"]:
        what = "adapters" if LORA in table.form else "block's numbers"
        raise UserError(
            f"{source} has SHA-256 {source.sha256}; expected {identity['student.sha256']}, of the "
            f"base that the {what} of {workdir}, step {step}, were trained on: they are nothing "
            f"without it. Put that file back, or say where it is: {_NAME_BASE}."
        )
    base = cut_layers(source, split_layers(identity.get("student.layers", "")))
    base = tie_head(base, identity.get("student.head", "auto"))
    saved = Saved(workdir, step, "checkpoint", int(identity["train.seed"]), source)
    if find_head(table.form) is not None:
        return dataclasses.replace(base, saved=saved)
    if BLOCK in table.form:
        base, spec = drop_block(base), dataclasses.replace(base.spec, drafts=1)
        return dataclasses.replace(
            base, table=_add_block(base.table, spec, table), spec=spec, saved=saved
        )
    if table.rounds:
        whole = SavedSum(workdir, step, base.base.table, base.spec)
        return dataclasses.replace(base.base, table=whole, saved=saved)
    adapters = saved_adapters(table, f"{workdir}, step {step}")
    return dataclasses.replace(_adapt(base, adapters), saved=saved)


def _find_step(workdir: Path, newest: int) -> int:
    """Finds the best step by the held-out figure; logs it if it is not the newest."""
    best = find_best(workdir)
    if best is None or best.step == newest:
        return newest
    _log.warning(
        "%s: takes step %d, the best by held-out %s (%.6g); the newest, %d, is "
        "checkpoints/%s there",
        *(workdir, best.step, best.name, best.value, newest, NEWEST),
    )
    return best.step


def tie_head(checkpoint: Checkpoint, head: str = "auto") -> Checkpoint:
    """Ties the architecture's head as `student.head` says; "auto": see `has_tied_head`."""
    tied = has_tied_head(checkpoint.table, checkpoint.spec) if head == "auto" else head == "tied"
    return dataclasses.replace(checkpoint, spec=dataclasses.replace(checkpoint.spec, tied=tied))


def run_sources(workdir: Path, student: str = "", tokenizer: str = "") -> tuple[str, str]:
    """Returns the paths of a run's initial student and its tokenizer, unless they are given.

    Reads the run's receipt; relative paths start at the folder that the run was started in, and
    files that the Hub's cache no longer has are downloaded again. The tokenizer is "" if it is the
    student's. Raises `MissingFileError` if the receipt does not name the student, or if it no
    longer exists.
    """
    receipt = _receipt_paths(workdir)
    student = fetch_path(student or receipt.get("student", ""), TOKENIZER)
    if not student:
        raise MissingFileError(
            f"{workdir} does not say which student it began with (no {RECEIPT} with its config): "
            f"name it, the run's student.path: {_NAME_BASE}."
        )
    if not Path(student).exists():
        raise MissingFileError(
            f"{student}: no such file or folder; expected the student that the run in {workdir} "
            f"began with, for its config and tokenizer. Say where it is now: {_NAME_BASE}."
            f"{suggest_path(student)}"
        )
    ours = "" if tokenizer else fetch_path(receipt.get("tokenizer", ""), TOKENIZER)
    return student, tokenizer or (ours if Path(ours).exists() else "")


def _end_of_documents(workdir: Path) -> str:
    """`data.end_of_document` of a run, by its receipt; "" without one."""
    try:
        data = (read_receipt(workdir) or {})["config"]["data"]
        return str(data.get("end_of_document") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _receipt_paths(workdir: Path) -> dict[str, str]:
    try:
        receipt = read_receipt(workdir) or {}
        config = receipt["config"]
        data = config.get("data") or {}
        named = {"student": config["student"]["path"], "tokenizer": data.get("tokenizer")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

    def absolute(path: str) -> str:
        path = os.path.expanduser(path)
        return path if Path(path).exists() else origin(path) or resolve_path(receipt, path)

    return {name: absolute(path) for name, path in named.items() if path}
