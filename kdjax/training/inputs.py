"""Reads a run's inputs: its rows and prompts, and the hashes of the files that it names."""

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.config import (
    OWN,
    Config,
    DataConfig,
    LossConfig,
    StudentConfig,
    count_own_rows,
    flatten,
    last_step,
    name_files,
)
from kdjax.data import pipeline
from kdjax.data.counts import TextCounts
from kdjax.data.fields import Fields
from kdjax.data.rows import RowSet, RowSettings, check_split, prepare_rows, rows_key, warn_of_marks
from kdjax.data.sources import find_files, survey_files
from kdjax.data.teacher_cache import hash_index, join_hashes, read_index, split_caches
from kdjax.data.text import openings, render_records
from kdjax.device import cluster
from kdjax.errors import MissingFileError, UserError
from kdjax.formats.imatrix import hash_importance
from kdjax.formats.saved import read_receipt, saved_run, saved_steps
from kdjax.formats.start import hash_start
from kdjax.hub import PREFIX
from kdjax.losses.divergences import list_files, parse_divergence
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.identity import CONTENTS, check_same_run, identify
from kdjax.training.pair import Pair, open_pair
from kdjax.training.rollouts import check_templates, open_prompts
from kdjax.training.user_code import NO_CODE, UserCode

_log = logging.getLogger("kdjax")

_FILES = "loss.divergence.sha256 of "  # in an identity, before a file's function
_READINGS = 4  # up to 4 epochs, text teaches as well as new text (arXiv:2305.16264)


def prepare_all(config: Config, pair: Pair, begun: str = "") -> RowSet:
    """Returns the rows of a run: packed text, from the cache if it has them.

    `begun` is the key of the rows that the run began with, if it has begun. Raises `UserError` for
    a teacher with another chat template than the prompts', or of another tokenizer and without one.
    """
    writes = config.rollout.prompts and config.rollout.writer == "teacher"
    pair.vocabulary.refuse(writes and "rollout.writer=teacher", "it would write its own ids")
    tensor = config.mesh.tensor > 1 and f"mesh.tensor={config.mesh.tensor}"
    pair.vocabulary.refuse(tensor, "rows of a split head are not put in another order")
    _learn_conversations(config, pair)  # refuses before the text is packed, which may take hours
    rows = prepare(config.data, pair.tokenizer, begun)
    for line in count_run(config, rows).lines():
        _log.info("%s", line)
    reader = pair.vocabulary.find_reader(pair.teacher)
    if config.rollout.prompts and reader is not None:
        tokenizers = pair.tokenizer, reader.tokenizer
        check_templates(config.rollout, *tokenizers, Fields.parse(config.data.fields))
    return rows


_SAMPLED = 64  # rows


def _learn_conversations(config: Config, pair: Pair) -> None:
    """Reads conversations as a teacher of another tokenizer does."""
    if pair.teacher is None:
        return
    both, fields = (pair.tokenizer, pair.teacher.tokenizer), Fields.parse(config.data.fields)
    files = [f for side in row_settings(config.data, pair.tokenizer).find_files() for f in side]
    pair.vocabulary.learn(render_records(files, *both, fields))
    prompts = find_files(config.rollout.prompts, fields) if config.rollout.prompts else []
    read = zip(*(openings(prompts, x, fields) for x in both), strict=True)
    pair.vocabulary.learn_prompts((ours.text, theirs.text) for ours, theirs in read if ours.chat)


def read_shared(config: Config, pair: Pair, rows: RowSet) -> None:
    """Logs what is compared with a teacher of another tokenizer.

    Raises `UserError` if too few positions are.
    """
    batches = pipeline.eval_batches(rows.train, batch_size=8, limit=_SAMPLED)
    pair.vocabulary.sample(batches, allow_few=config.loss.allow_few_shared)


def find_begun(workdir: Path) -> str:
    """The key of the rows that the run in `workdir` began with; empty if none began there."""
    with contextlib.suppress(ValueError, OSError):  # a damaged receipt is the receipt's concern
        return ((read_receipt(workdir) or {}).get("data") or {}).get("rows", "")
    return ""


def prepare(data: DataConfig, tokenizer: Tokenizer, begun: str = "") -> RowSet:
    """Returns packed rows of the configured text, from the cache if it has them."""
    try:
        folder = Path(data.cache_dir).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"data.cache_dir={data.cache_dir}: found a user without a home; expected one. Name "
            "another folder: --config.data.cache_dir=DIR."
        ) from error
    with cluster.first_before_others("rows"):
        rows = prepare_rows(row_settings(data, tokenizer), folder, begun)
    for side in ("train", "heldout"):
        info = rows.info[side]
        _warn_of_long(side, info, data)
        warn_of_marks(side, info["marks"], tokenizer, data.parse_special)
    return rows


def count_run(config: Config, rows: RowSet) -> TextCounts:
    """Counts what the run reads of its text, and what is left out."""
    fields = Fields.parse(config.data.fields)
    files: dict[str, dict[str, int]] = {}
    for patterns in filter(None, (config.data.train, config.data.heldout)):
        for why, counts in survey_files(patterns, fields).count().items():
            files[why] = dict(Counter(files.get(why, {})) + Counter(counts))
    return TextCounts(rows.info, files, count_epochs(config, rows))


def count_epochs(config: Config, rows: RowSet) -> float:
    """The number of epochs of the training rows that the run reads."""
    read = config.train.batch_size - count_own_rows(config)
    return last_step(config) * read / len(rows.train)


def _warn_of_long(side: str, info: Mapping[str, Any], data: DataConfig) -> None:
    """Warns of records that are longer than a row; rows of earlier versions have no count."""
    if info.get("long"):
        what, other = "left out", "data.long=cut keeps their ends"
        if data.long == "cut":
            what, other = "cut, their ends kept", "data.long=leave_out leaves them out"
        _log.warning(
            "text, %s: %s records are longer than a row of %s tokens and are %s, the first %s: %s, "
            "a larger data.seq_len (--seq-len) all of them",
            *(side, f"{info['long']:,}", f"{data.seq_len + 1:,}", what, info["first_long"], other),
        )


def warn_of_readings(config: Config, epochs: float) -> None:
    """Warns of text that the run would read so often that students remember it."""
    if epochs > _READINGS:
        _log.warning(
            "train: %s steps are %.1f epochs of the text, and students memorise what they read for "
            "more than %s: use more text (data.train, --text), or fewer steps",
            *(f"{config.train.steps:,}", epochs, _READINGS),
        )


def check_texts(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raises `UserError` for text that leaves no document to train on, or to hold out.

    Text of the Hub, or that is not on this machine, is not checked.
    """
    texts = ",".join((data.train, data.heldout))
    if any(part.strip().startswith(PREFIX) for part in texts.split(",")):
        return
    with contextlib.suppress(MissingFileError):
        check_split(row_settings(data, tokenizer))


def list_read_rows(config: Config, rows: RowSet) -> np.ndarray:
    """The rows that a run and its evaluations read, as a cache numbers them."""
    train, count = config.train, len(rows.train)
    read = pipeline.list_rows(
        count, batch_size=train.batch_size, seed=train.seed, batches=last_step(config)
    )
    return np.concatenate(
        [read, count + pipeline.list_heldout(len(rows.heldout), config.eval.rows)]
    )


def row_settings(data: DataConfig, tokenizer: Tokenizer) -> RowSettings:
    """Settings that decide the rows; raises `UserError` for an unknown `data.end_of_document`."""
    if data.end_of_document:
        if data.end_of_document not in tokenizer.tokens:
            raise UserError(
                f"data.end_of_document={data.end_of_document!r} is not a token of the tokenizer; "
                "leave it empty for the tokenizer's end-of-text."
            )
        end = tokenizer.tokens.index(data.end_of_document)
    else:
        end = tokenizer.end_of_text_id
    return RowSettings(
        train=data.train,
        heldout=data.heldout,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        heldout_fraction=data.heldout_fraction,
        end_of_document_id=end,
        max_segments=data.max_segments,
        parse_special=data.parse_special,
        long=data.long,
        fields=data.fields,
    )


def hash_models(pair: Pair) -> dict[str, str | None]:
    """SHA-256s of the models' files, which one process of each host reads."""
    sides = ("teacher", pair.teacher), ("student", pair.student)
    return cluster.once_a_host(
        "models",
        lambda: {f"{side}.sha256": opened and opened.sha256 for side, opened in sides},
    )


def hash_rounding(student: StudentConfig) -> dict[str, str]:
    """SHA-256s of the files of importances and of the start, if the config names them."""
    files = {"imatrix": (student.imatrix, hash_importance), "start": (student.start, hash_start)}
    return {f"student.{n}.sha256": digest(path) for n, (path, digest) in files.items() if path}


def hash_divergence(loss: LossConfig) -> dict[str, str]:
    """SHA-256s of the files whose functions `loss.divergence` names; runs them."""
    own = loss.divergence.startswith(OWN)
    return name_hashes({} if own else list_files(parse_divergence(loss.divergence)))


def name_hashes(files: Mapping[str, str]) -> dict[str, str]:
    """SHA-256s by functions such as `folder/mine.py:f`, under their names in an identity."""
    return {f"{_FILES}{name_files(source)}": sha for source, sha in files.items()}


def hash_text(config: Config, tokenizer: Tokenizer, begun: str = "") -> dict[str, str]:
    """Hashes of the text and the prompts, from the files alone; `begun` is as for `rows_key`."""
    rows = rows_key(row_settings(config.data, tokenizer), begun=begun)
    if not config.rollout.prompts:
        return {"data.rows": rows}
    return {"data.rows": rows, "rollout.prompts": open_prompts(config, tokenizer).key}


def hash_contents(config: Config, begun: str = "") -> dict[str, Any]:
    """Hashes the contents that `identify` needs, from the files alone; loads nothing."""
    pair = open_pair(config)
    contents: dict[str, Any] = hash_text(config, pair.tokenizer, begun)
    if config.teacher.cache:
        caches = split_caches(config.teacher.cache)
        contents["teacher.cache"] = join_hashes(
            [(weight, hash_index(read_index(folder)[1])) for weight, folder in caches]
        )
    return (
        contents | hash_rounding(config.student) | hash_divergence(config.loss) | hash_models(pair)
    )


def check_finished(config: Config, workdir: Path, user_code: UserCode = NO_CODE) -> None:
    """Raises `UserError` unless `workdir` has the finished run of `config` and `user_code`.

    Loads nothing: models and text are hashed where they are. A missing file counts as unchanged
    if the run's receipt has the same path.
    """
    saved = saved_run(workdir, saved_steps(workdir)[-1])["identity"]
    try:
        current = identify(config, hash_contents(config, saved.get("data.rows", "")))
    except MissingFileError:
        then, now = flatten((read_receipt(workdir) or {}).get("config", {})), flatten(config)
        if not then:
            raise
        moved = [name for name in CONTENTS if now[name] != then.get(name)]
        current = identify(config, {name: now[name] for name in moved})
        try:
            current |= hash_divergence(config.loss)
        except MissingFileError:
            current |= {name: sha for name, sha in saved.items() if name.startswith(_FILES)}
        hashes = CONTENTS.values()
        saved = {name: value for name, value in saved.items() if name not in hashes}
        saved |= {name: then.get(name) for name in moved}
    check_same_run(saved, current | user_code.identify_finished(saved), workdir)
