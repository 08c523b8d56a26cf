"""Decides whether two runs are the same: for starting, resuming, verifying, caching and rollouts.

The identity of a run is a flat record that every checkpoint holds: the fields of the config that
decide what is computed and, under separate names, hashes of the files that paths name. One rule
compares two: a field that a record lacks has its default. So a new field of the config is part of
every identity, and runs from before the field go on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdjax.config import (
    REMOVED,
    Config,
    count_own_rows,
    flatten,
    name_files,
    name_numbers,
    refuse_removed,
    refuse_removed_weights,
)
from kdjax.data.rows import RowSet
from kdjax.data.teacher_cache import CacheSpec
from kdjax.errors import UserError
from kdjax.formats.recipes import identify_types
from kdjax.training.pair import Pair
from kdjax.training.teachers import CachedHidden, CachedTopK

# Fields with a path, and the name of the hash of its content that the identity has instead.
CONTENTS = {
    "teacher.path": "teacher.sha256",
    "teacher.cache": "teacher.cache",
    "student.path": "student.sha256",
    "student.imatrix": "student.imatrix.sha256",
    "student.start": "student.start.sha256",
    "data.train": "data.rows",
    "data.heldout": "data.rows",
    "data.heldout_fraction": "data.rows",
    "data.tokenizer": "data.rows",
    "data.long": "data.rows",
    "data.fields": "data.rows",
    "rollout.prompts": "rollout.prompts",
}
# Fields, and sections, that change only cost, place or reports: a run goes on with other values.
FREE = (
    "student.remat",
    "data.cache_dir",
    "loss.chunk_tokens",
    "train.microbatches",
    "rollout.batch_size",
    "rollout.stop_growth",
    "rollout.allow_other_template",
    "loss.allow_few_shared",
    "eval.",
    "checkpoint.",
    "mesh.",
    "log.",
    "smoke.",
)
# Fields that a run with `train.after` may change.
_SCHEDULE = {
    "train.steps",
    "train.after",
    "optim.learning_rate",
    "optim.final_learning_rate",
    "optim.warmup_steps",
    "loss.final_temperature",
    "loss.final_alpha",
}
# Sections without effect while this field of theirs is empty.
_SWITCHES = {"rollout.": "rollout.prompts", "student.lora.": "student.lora.rank"}
_SWITCHES |= {"student.dspark.": "student.block"}
# Fields that a round of answers has under other names (number of rows, prompts), and fields that
# caches have under other names, or never had.
_ROUNDS = {"rollout.share", "rollout.prompt_tokens"}
_CACHES = {"teacher.weights", "teacher.param_dtype", "teacher.allow_degenerate"}


def identify(config: Config, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the identity of a config's run; `contents` has hashes by the names of `CONTENTS`."""
    return _select_decisive(_flatten(config)) | dict(contents)


def _flatten(config: Config) -> dict[str, Any]:
    """The fields of a config, with one value for values of equal meaning."""
    weights = {
        "teacher.weights": name_numbers(config.teacher.weights),
        "student.lora.weights": name_numbers(config.student.lora.weights),
        "loss.divergence": name_files(config.loss.divergence),  # contents have hashes of the files
    }
    types = {"student.quantize": identify_types(config.student.quantize)}
    return flatten(config) | weights | types


def _select_decisive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the fields that decide what is computed, without the contents of files."""
    off = {section for section, switch in _SWITCHES.items() if not fields[switch]}
    left_out = {*CONTENTS, *FREE, *off}
    sections = tuple(name for name in left_out if name.endswith("."))
    return {
        name: value
        for name, value in fields.items()
        if name not in left_out and not name.startswith(sections)
    }


def list_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Lists name, saved value and current value of every field that differs.

    Raises `UserError` for a saved identity with a removed kind of teacher's weights.
    """
    refuse_removed_weights(saved.get("teacher.weights", ""))
    defaults = _flatten(Config()) | {name: gone.off for name, gone in REMOVED.items()}

    def read(record: Mapping[str, Any], name: str) -> Any:
        return record.get(name, defaults.get(name))

    for name in sorted(saved.keys() | current.keys()):
        was, now = read(saved, name), read(current, name)
        if was != now:
            yield name, was, now


def check_same_run(
    saved: Mapping[str, Any], current: Mapping[str, Any], workdir: Path, step: int = 0
) -> None:
    """Raises `UserError` naming every field in which the saved run differs from this one.

    A run that had finished at `step`, of the checkpoint, goes on with another schedule if the
    current one says so (`train.after`). A removed field that it used is refused as such.
    """
    removed = [
        said for name, *_ in list_differences(saved, current) if (said := refuse_removed(name))
    ]
    if removed:
        raise UserError(
            f"{workdir} holds a checkpoint of a run that cannot go on:\n  " + "\n  ".join(removed)
        )
    finished = step and step == saved.get("train.steps")
    goes_on = finished and step == current.get("train.after")
    differences = {
        name: f"{name}: the checkpoint has {_show(was)}, now {_show(now)}"
        for name, was, now in list_differences(saved, current)
        if not (goes_on and name in _SCHEDULE)
    }
    if not differences:
        return
    remedy = "Restore these values, or choose a new workdir (shrink: --work)."
    if finished and current.get("train.steps", 0) > step and differences.keys() <= _SCHEDULE:
        remedy = (
            f"That run has finished. To go on from its checkpoint of step {step}, with the same "
            f"optimizer and the text that follows, set train.after={step}: the learning "
            "rate rises again over optim.warmup_steps and falls to its final value at train.steps. "
            + remedy
        )
    raise UserError(
        f"{workdir} holds a checkpoint of another run, which this one would not continue:\n  "
        + "\n  ".join(differences.values())
        + f"\n{remedy}"
    )


def _show(value: Any) -> str:
    return "'(absent)'" if value is None else repr(value)


def describe_answers(config: Config) -> dict[str, Any]:
    """The fields that decide a round's rows, in addition to seed, student and prompts.

    Newer fields of rollouts and of the student are included only if they are not at their
    defaults, so that older rounds stay valid.
    """
    names = ("every", "answers", "temperature", "max_tokens", "train_cut")
    settings: dict[str, Any] = {name: getattr(config.rollout, name) for name in names}
    settings |= {"rows": count_own_rows(config), "seq_len": config.data.seq_len}
    settings |= {"max_segments": config.data.max_segments}
    said = _ROUNDS | {f"rollout.{name}" for name in names}
    return settings | _leave_defaults(_flatten(config), ("rollout.", "student."), said)


def _leave_defaults(
    fields: Mapping[str, Any], sections: tuple[str, ...], said: set[str]
) -> dict[str, Any]:
    """Fields of these sections that have an effect, are not in `said`, and are not at defaults."""
    defaults = _flatten(Config())
    return {
        name: value
        for name, value in _select_decisive(fields).items()
        if name.startswith(sections) and name not in said and value != defaults[name]
    }


def describe_cache(
    config: Config, pair: Pair, rows: RowSet, kind: CachedHidden | CachedTopK, teacher: str
) -> CacheSpec:
    """Describes the inputs of a cache of this run's teacher, of SHA-256 `teacher`.

    For a server's answers, which are the run's text, there is no teacher: its SHA-256 is "".
    """
    k = kind.k if isinstance(kind, CachedTopK) else 0
    return CacheSpec(
        kind=kind.name,
        k=k,
        temperature=config.loss.temperature if k else None,
        teacher=teacher,
        rows=rows.key,
        tokenizer=pair.tokenizer.content_hash,
        vocabulary=(pair.vocabulary.width, pair.vocabulary.real),
        positions=config.data.seq_len,
        width=pair.teacher.spec.hidden_size if pair.teacher else 0,
        dtype=config.train.compute_dtype,
        weights=name_numbers(config.teacher.weights),
        sides=(len(rows.train), len(rows.heldout)),
        settings=_leave_defaults(_flatten(config), ("teacher.",), _CACHES)
        | pair.vocabulary.cache_settings,
    )
