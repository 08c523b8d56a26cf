"""The configuration: nested dataclasses, their defaults, and one `validate()`.

A file in `configs/` returns a `Config` from `get_config()`; flags such as
`--config.optim.learning_rate=2e-5` override single fields. The comment beside a field is its help:
`kdjax train --help` and docs/settings.md show it. Nothing here imports JAX.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from numbers import Real
from typing import Any, TypeVar, cast

from kdjax.errors import UserError, check_type, suggest

_Call = TypeVar("_Call", bound=Callable[..., Any])
WEIGHTS = ("dense", "packed", "float8")  # how a model's weights are stored on the device
# Names of earlier versions and of the reference system (aprender), in forms such as FILE@q4k and in
# environment variables: read, never written.
_OLD_WORDS = {
    "dequant": "dense",
    "q4k": "packed",
    "fp8": "float8",
    "train": "auto",
    "cudatrainer": "dense",
    "cublas": "dense",
    "realizar": "packed",
    "realizar-q4k": "packed",
}


def refuse_removed_weights(word: str) -> None:
    """Raises `UserError` for float8 with sums in float32, which earlier versions had."""
    if word in ("float8_precise", "fp8_precise"):
        raise UserError(
            f"{word} was removed (docs/records/2026-11-21-float8-teacher.md): take float8, whose "
            "KL from the file's numbers is 4% larger; the tag before-the-cut still has it."
        )


def read_weights(word: str) -> str:
    """Translates an old name of stored weights to today's; any other word stays as it is.

    Raises `UserError` for a removed one.
    """
    refuse_removed_weights(word)
    return _OLD_WORDS.get(word, word)


OWN = "own:"  # prefix, in loss.divergence, of the name of a user-defined function
OWN_BLOCK = "own"  # as student.block and --draft: the drafting block in the model's file
NEW = "new"  # as student.block: a random one, in place of the file's
DSPARK = "dspark"  # as student.block: a new head that reads inner states (`models.dspark`)
EAGLE3 = "eagle3"  # another kind of head (`models.eagle`)
SELF = "self"  # as teacher.path: the student's initial weights, frozen


@dataclasses.dataclass
class TeacherConfig:
    """The frozen teacher."""

    path: str = ""  # GGUF, .apr, HF folder, hf:ORG/REPO/FILE; self: the student; "": none
    weights: str = "auto"  # auto | dense | packed | float8: how they are stored on the device
    param_dtype: str = "bfloat16"  # of dense weights, and of packed ones once decoded
    cache: str = ""  # folder of `kdjax cache`, or several, 0.7*a,0.3*b, in place of a loaded model
    allow_degenerate: bool = False  # accept a teacher with the student's weights


@dataclasses.dataclass
class LoraConfig:
    """Adapters on a frozen student, in place of a full fine-tune."""

    rank: int = 0  # rows of A, columns of B, such as 16; 0: no adapters, a full fine-tune
    alpha: float = 32.0  # an adapter adds alpha / rank * B A to its matrix
    targets: str = ""  # matrices, as PEFT or GGUF names them: q_proj,attn_v; "": all of the layers
    weights: str = "packed"  # packed | dense | float8: how the frozen student is stored
    learning_rate: float = 1e-4  # in place of optim.learning_rate, which is for full fine-tunes


@dataclasses.dataclass
class DSparkConfig:
    """The head of `student.block=dspark`."""

    layers: int = 2  # layers of the head
    slots: int = 7  # tokens that a pass of the head drafts
    rank: int = 256  # rank of the bias by the token before; 0: none, a DFlash head
    decay: float = 4.0  # a slot's loss weighs exp(-k / decay), k slots after the first
    confidence: float = 1.0  # weight of the loss of a draft's predicted acceptance; 0: none


@dataclasses.dataclass
class StudentConfig:
    """The student; its weights are float32 masters for any train.compute_dtype."""

    path: str = ""  # as teacher.path; with init=random only its shapes are read
    layers: str = ""  # keep these layers only, such as 0,3,7,23, for a fast draft; "": all
    init: str = "checkpoint"  # checkpoint | random: the file's weights, or its shapes only
    quantize: str = ""  # quantization-aware: q4_0, a file of types, or q4_k_m,embed=Q8_0; "": no
    imatrix: str = ""  # file of `kdjax imatrix` or llama-imatrix that weights rounding errors
    start: str = ""  # masters and scales to begin from, as `kdjax shrink` writes them; "": fitted
    head: str = "auto"  # auto | tied | untied; auto: as the header says, or one matrix in GGUF
    remat: str = "auto"  # auto | none | dots | full: what the backward pass recomputes, for memory
    block: str = ""  # own | new (MTP) | dspark | eagle3: what to train, for teacher.path=self
    later_drafts: str = ""  # weights of a pass's drafts after the first, such as 0.6,0.35; "": none
    draft_ids: int = 0  # most frequent ids that eagle3 drafts; a multiple of 128 is fast; 0: all
    dspark: DSparkConfig = field(default_factory=DSparkConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclasses.dataclass
class DataConfig:
    """Text, packed once into rows of `seq_len` positions."""

    train: str = ""  # folders, globs, files (text or records), by commas; python:jax,flax
    heldout: str = ""  # as `train`; empty: `heldout_fraction` of the documents, by content hash
    heldout_fraction: float = 0.02  # of the documents, if `heldout` is empty
    fields: str = ""  # columns of records: user=instruction+input,assistant=output; "": their names
    seq_len: int = 1024  # positions a row; at most the context of both models
    end_of_document: str = ""  # token after each text; empty: the tokenizer's end-of-text
    max_segments: int = 32  # documents a row; attention kernels need the bound
    long: str = "leave_out"  # leave_out | cut: records longer than a row; cut keeps their ends
    parse_special: bool = False  # in plain text <|endoftext|> and similar become special ids
    tokenizer: str = ""  # a GGUF file, Hugging Face folder or hf: path; empty: the student's
    cache_dir: str = "~/.cache/kdjax/rows"  # packed rows, shared between runs


@dataclasses.dataclass
class LossConfig:
    """alpha * CE + (1 - alpha) * T^2 * KL(teacher_T || student_T), or another divergence."""

    temperature: float = 1.0  # T, of both models' softmax in the divergence
    alpha: float = 0.0  # weight of the cross-entropy with the text; 1 trains without the teacher
    final_temperature: float = 0.0  # T at the last step, linearly from temperature; 0: constant
    final_alpha: float = -1.0  # alpha at the last step, linearly from alpha; -1: constant
    divergence: str = "forward_kl"  # or jsd:beta=0.3, .5*jsd+.5*reverse_kl, FILE.py:FUNCTION
    chunk_tokens: int = 0  # positions whose logits exist at once; 0: 16384, 4096 or 1024, as fits
    vocabulary: str = "auto"  # auto | same | shared: compare what two tokenizers have in common
    allow_few_shared: bool = False  # continue if two tokenizers share few positions or little mass


@dataclasses.dataclass
class OptimConfig:
    """AdamW or Muon, linear warmup, cosine decay."""

    name: str = "adamw"  # adamw | muon: Muon for the layers' matrices, AdamW for the rest
    trainable: str = ""  # names or patterns, such as blocks/*/mlp, by commas; empty: everything
    learning_rate: float = 1e-5  # at the end of the warmup
    final_learning_rate: float = 1e-6  # at the last step
    warmup_steps: int = 20  # the rate rises from 0 over these
    weight_decay: float = 0.01  # of matrices; not of norms, biases, A_log and dt_bias
    beta1: float = 0.9  # decay of the mean gradient
    beta2: float = 0.95  # decay of the mean squared gradient
    eps: float = 1e-8  # added to the root mean square
    clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
    moment_dtype: str = "float32"  # float32 | bfloat16 (stochastic rounding): of stored moments


@dataclasses.dataclass
class TrainConfig:
    """Length of the run, size of a batch, numeric types."""

    steps: int = 1000  # optimizer steps
    after: int = 0  # continue a run that finished at this step, with a new warmup and decay
    seconds: float = 0.0  # end after this time of steps and rounds, before train.steps; 0: no limit
    batch_size: int = 16  # rows an optimizer step, over all devices
    microbatches: int = 1  # parts a batch is computed in; saves memory, changes no result
    seed: int = 0  # of the data's order and of random weights
    compute_dtype: str = "auto"  # auto | bfloat16 | float32: of activations and products
    reduce_dtype: str = "float32"  # float32 | bfloat16: of gradients while several GPUs add them


@dataclasses.dataclass
class RolloutConfig:
    """On-policy data: the student's answers, written in rounds; off while `prompts` is empty."""

    prompts: str = ""  # as data.train; `messages` are answered, a `prompt` or `text` is continued
    writer: str = "student"  # student | teacher: which model writes the answers
    share: float = 1.0  # share of a batch's rows that are answers; the rest is data.train
    every: int = 8  # optimizer steps between rounds of answers
    answers: int = 1  # answers to each prompt
    temperature: float = 1.0  # of sampling; 0: greedy
    max_tokens: int = 256  # length of the longest answer
    prompt_tokens: int = 0  # length of the longest prompt; 0: data.seq_len - max_tokens
    train_cut: bool = True  # whether answers cut off at max_tokens are trained on
    batch_size: int = 1024  # answers written at a time, over all devices
    stop_growth: float = 2.0  # stop at N times round 0's length, repetition or divergence; 0: no
    allow_other_template: bool = False  # accept a teacher whose chat template differs


@dataclasses.dataclass
class EvalConfig:
    """Held-out evaluation of student and teacher."""

    every: int = 100  # optimizer steps; 0: only before and after training
    rows: int = 64  # at most this many held-out rows; 0: all
    batch_size: int = 8  # rows at a time, over all devices
    samples: int = 3  # held-out prompts that the student continues before and after; 0: none
    best: str = ""  # figure that chooses the best checkpoint: loss, kl, agreement; "": loss
    stop_worse: float = 0.0  # stop if worse than before training by N standard errors; 0: no


@dataclasses.dataclass
class CheckpointConfig:
    """Saved state: student, optimizer, data position."""

    every: int = 100  # optimizer steps; 0: only at the end
    keep: int = 2  # number of newest checkpoints to keep, in addition to the best


@dataclasses.dataclass
class MeshConfig:
    """Devices by axis; -1 for `data` takes the remaining devices."""

    data: int = -1  # rows
    fsdp: int = 0  # rows and weights; 0: the fewest with which the plan fits
    tensor: int = 1  # heads, hidden units, vocabulary


TRACKERS = "wandb", "trackio", "mlflow"


@dataclasses.dataclass
class LogConfig:
    """Logs of a run; `metrics.jsonl` is always written."""

    every: int = 10  # steps between plain log lines
    tensorboard: bool = True  # writes tensorboard/ too
    tracker: str = ""  # also sends to wandb:PROJECT, trackio:PROJECT or mlflow:EXPERIMENT


@dataclasses.dataclass
class SmokeConfig:
    """A short trial of the configured run, which saves nothing and ends with a verdict."""

    steps: int = 0  # optimizer steps of the trial, at most train.steps; 0: no trial, the full run


@dataclasses.dataclass
class Config:
    """The config of a run."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    log: LogConfig = field(default_factory=LogConfig)
    smoke: SmokeConfig = field(default_factory=SmokeConfig)


@dataclasses.dataclass(frozen=True)
class Removed:
    """A field of earlier versions, and its replacement."""

    off: Any  # the value without effect: saved runs that have it go on
    instead: str  # what to do, as "train on text" in "REMOVED: train on text"
    record: str  # of docs/records, without .md: the evidence for the removal
    free: bool = False  # whether saved runs go on with any value, as no result depends on it


class RemovedError(UserError):
    """A removed field was used."""


_WEIGHTS = f"set teacher.weights, to one of auto, {', '.join(WEIGHTS)}"
_HINTS = (
    "its gain was within noise; train on on-policy answers (rollout.prompts)",
    "2026-11-26-arms-rest-h200",
)
# By the names of fields, or of sections. A config, a flag or a saved run that uses one is refused
# by its name.
REMOVED: dict[str, Removed] = {
    "teacher.backend": Removed("auto", _WEIGHTS, "2026-11-21-float8-teacher", free=True),
    "teacher.compute": Removed("train", _WEIGHTS, "2026-11-21-float8-teacher"),
    "then": Removed(
        (), "a second run goes on from the first: student.path=runs/a", "2026-11-26-arms-rest-h200"
    ),
    "train.until": Removed(
        "", "train.steps and train.seconds end a run", "2026-11-26-arms-rest-h200"
    ),
    "loss.beyond": Removed(1.0, "the teacher itself is the target", "2026-11-26-arms-rest-h200"),
    "student.quantize_every": Removed(
        0, "leave it out: scales are fitted once, at the start", "2026-11-25-rounded-scales-h100"
    ),
    "rollout.hints": Removed(False, *_HINTS),
    "rollout.hint_tokens": Removed(0, *_HINTS),
    "rollout.gap_exercises": Removed(64, *_HINTS),
    "log.wandb_project": Removed("", "set log.tracker=wandb:PROJECT", "", free=True),
    "rollout.rounds": Removed(
        0,
        "write text with `kdjax answers MODEL --prompts=FILES --out=FILE` and train on it "
        "(data.train=FILE)",
        "2026-11-23-own-answers",
    ),
}


_ROUNDED = 'form=kdjax.Rounded("q4_0", imatrix=...) says it', ""
_FITTED = "leave it out: scales are fitted once, at the start", "2026-11-25-rounded-scales-h100"
_PLANNED = "`kdjax plan` plans a training run", "2026-11-26-importance-and-verified-h100"
# Names, arguments and flags of earlier versions, as a user writes them.
REMOVED_NAMES: dict[str, Removed] = {
    "kdjax.Beyond": Removed(None, REMOVED["loss.beyond"].instead, REMOVED["loss.beyond"].record),
    "kdjax.check_gap": Removed(None, *_HINTS),
    "distill(gate=)": Removed(None, *_HINTS),
    "make_step(quantize=)": Removed(None, *_ROUNDED),
    "make_step(imatrix=)": Removed(None, *_ROUNDED),
    "make_step(quantize_every=)": Removed(None, *_FITTED),
    "make_step(quantize_until=)": Removed(None, *_FITTED),
    "make_step(vocabulary=)": Removed(None, "leave it out: both models' tokens decide it", ""),
    "kdjax answers --hint": Removed(None, *_HINTS),
    "kdjax evaluate --plan": Removed(None, *_PLANNED),
    "kdjax generate --plan": Removed(None, *_PLANNED),
}


def find_removed(name: str) -> Removed | None:
    """Finds the removed field of this name, such as `train.until`, or its removed section."""
    return REMOVED.get(name) or REMOVED.get(name.partition(".")[0])


def refuse_removed(name: str) -> str:
    """Says that a field, name, argument or flag was removed, why, and what to do; "" for others."""
    if (gone := find_removed(name) or REMOVED_NAMES.get(name)) is None:
        return ""
    record = f" (docs/records/{gone.record}.md)" if gone.record else ""
    return f"{name} was removed{record}: {gone.instead}; the tag before-the-cut still has it"


def refusing(named: str) -> Callable[[_Call], _Call]:
    """Decorates a function that raises `RemovedError` for its removed arguments.

    `named` is an argument's full name with `{}` for its own: `make_step({}=)`.
    """

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def checked(*args: Any, **values: Any) -> Any:
            for name in values:
                if gone := refuse_removed(named.format(name)):
                    raise RemovedError(f"{gone}.")
            return call(*args, **values)

        return cast(_Call, checked)

    return decorate


Config.__init__ = refusing("{}")(Config.__init__)  # type: ignore[method-assign]
for _section in dataclasses.fields(Config):
    _kind: Any = type(getattr(Config(), _section.name))
    _kind.__init__ = refusing(f"{_section.name}.{{}}")(_kind.__init__)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a config, or its nested dict, to `{"optim.learning_rate": 1e-5, ...}`."""
    items = config if isinstance(config, dict) else dataclasses.asdict(config)
    flat: dict[str, Any] = {}
    for key, value in items.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def read_section(default: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Makes a section, or a config, from its `dataclasses.asdict`.

    `prefix` stands before the names of its fields. Raises `RemovedError` for a removed field that
    was used.
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            fields[name] = read_section(getattr(default, name), value, f"{prefix}{name}.")
            continue
        value = tuple(value) if isinstance(value, list) else value
        if (gone := find_removed(f"{prefix}{name}")) is None:
            fields[name] = value
        elif value != gone.off and not gone.free:
            raise RemovedError(refuse_removed(f"{prefix}{name}"))
    return type(default)(**fields)


def set_fields(config: Config, changes: Mapping[str, Any]) -> None:
    """Sets fields by their names, such as `train.steps`."""
    for name, value in changes.items():
        *sections, last = name.split(".")
        section: Any = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, last, value)


def name_numbers(weights: str) -> str:
    """Names weights by their numbers: packed weights decode to the numbers of dense ones."""
    return weights if weights == "float8" else "dense"


def count_own_rows(config: Config) -> int:
    """Counts the rows of a batch, over all processes, that are on-policy answers."""
    rollout = config.rollout
    return round(rollout.share * config.train.batch_size) if rollout.prompts else 0


def count_prompt_positions(config: Config) -> int:
    """Positions of the longest prompt whose answer is trained on."""
    return config.rollout.prompt_tokens or config.data.seq_len - config.rollout.max_tokens


def choose_optim(config: Config) -> OptimConfig:
    """The optimizer's settings for the run: adapters have a separate learning rate."""
    lora = config.student.lora
    if not lora.rank:
        return config.optim
    return dataclasses.replace(config.optim, learning_rate=lora.learning_rate)


def settle_dtype(config: Config, platform: str) -> Config:
    """Copies the config with the number type that `train.compute_dtype=auto` means on a platform.

    float32 on a "cpu", whose products in bfloat16 are slower, bfloat16 elsewhere.
    """
    if config.train.compute_dtype != "auto":
        return config
    dtype = "float32" if platform == "cpu" else "bfloat16"
    return dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype=dtype))


def last_step(config: Config) -> int:
    """The last optimizer step of this process: of the run, or of its smoke trial."""
    return config.smoke.steps or config.train.steps


_Rule = tuple[Callable[[Any], object], str]  # is the value good?; what must it be?


def _choice(*options: str) -> _Rule:
    return (lambda v: v in options), "one of " + ", ".join(options)


# Names that `loss.divergence` may have, and the parameters of each, with their defaults.
# `losses.divergences` defines them.
DIVERGENCES: dict[str, dict[str, float]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"beta": 0.5},
    "skewed_forward_kl": {"skew": 0.1},
    "skewed_reverse_kl": {"skew": 0.1},
    "total_variation": {},
}


def check_share(name: str, value: float) -> None:
    """Raises `UserError` unless the value, a divergence's parameter, lies between 0 and 1."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise UserError(f"{name}={value!r}: must be above 0 and below 1")


def check_weights(weights: Sequence[float]) -> None:
    """Raises `UserError` unless the weights are positive and add up to 1."""
    if not all(weight > 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise UserError(
            f"the weights of a mixture are {shown}: each must be above 0, and their sum 1"
        )


def split_layers(text: str) -> tuple[int, ...]:
    """`"0,3,7"` as (0, 3, 7); `UserError` unless they are whole numbers that rise."""
    try:
        layers = tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        layers = (0, 0)
    if any(a >= b for a, b in zip((-1, *layers), layers, strict=False)):
        raise UserError(f"layers={text!r}: must be whole numbers that rise, such as 0,3,7,23")
    return layers


MOST_LATER = 7  # drafts of a pass after the first, of a block that drafts


def split_drafts(text: str) -> tuple[float, ...]:
    """`"0.6,0.35"` as (0.6, 0.35), weights of drafts; `UserError` as `check_drafts`."""
    try:
        return check_drafts(tuple(map(float, text.split(","))) if text else ())
    except ValueError:
        raise UserError(f"later_drafts={text!r}: must be numbers, such as 0.6,0.35") from None


def check_drafts(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Returns weights of a pass's drafts after the first; `UserError` for some that cannot be."""
    if len(weights) > MOST_LATER or not all(0 < x < math.inf for x in weights):
        raise UserError(
            f"found weights {weights} of the drafts after a pass's first; expected at most "
            f"{MOST_LATER} numbers above 0, such as (0.6, 0.35) for three drafts a pass."
        )
    return weights


# A function of a user's file in `loss.divergence`, such as mine.py:alpha_divergence.
_FUNCTION = re.compile(r"([^*+]+\.py):(\w+)")


def split_function(name: str) -> tuple[str, str] | None:
    """Splits `mine.py:alpha_divergence` to file and function; None for a name of `DIVERGENCES`."""
    match = _FUNCTION.fullmatch(name)
    return (match[1], match[2]) if match else None


def map_files(divergence: str, change: Callable[[str], str]) -> str:
    """Replaces the path of each file in a text of `loss.divergence`."""
    return _FUNCTION.sub(lambda match: f"{change(match[1])}:{match[2]}", divergence)


def name_files(divergence: str) -> str:
    """A text of `loss.divergence` without the folders of its files."""
    return map_files(divergence, lambda path: path.replace("\\", "/").rpartition("/")[2])


def split_divergence(text: str) -> list[tuple[float, str, dict[str, float]]]:
    """Parses a text to weights, names and parameters of divergences; `UserError` for another text.

    `"jsd:beta=0.3"` is `[(1.0, "jsd", {"beta": 0.3})]`. In a mixture each part has its weight:
    `"0.7*forward_kl+0.3*total_variation"`. A function of a file, `"mine.py:f"`, is its own name.
    """
    if "*" not in text:
        return [(1.0, *_split_part(text))]
    parts = []
    for part in text.split("+"):
        number, _, rest = part.partition("*")
        try:
            weight = float(number)
        except ValueError:
            raise UserError(
                f"divergence {text!r}: found {part.strip()!r}; expected of each part of a mixture "
                "WEIGHT*NAME, such as 0.5*forward_kl"
            ) from None
        parts.append((weight, *_split_part(rest.strip())))
    check_weights([weight for weight, *_ in parts])
    return parts


def _split_part(text: str) -> tuple[str, dict[str, float]]:
    if split_function(text):
        return text, {}
    name, _, rest = text.partition(":")
    if name not in DIVERGENCES:
        raise UserError(
            f"divergence {name!r} is unknown; known are {', '.join(DIVERGENCES)}, and functions "
            "of a file, as mine.py:alpha_divergence"
        )
    parameters: dict[str, float] = {}
    for field_text in rest.split(",") if rest else ():
        key, _, number = field_text.partition("=")
        if key not in DIVERGENCES[name]:
            known = ", ".join(DIVERGENCES[name]) or "no parameters"
            raise UserError(f"divergence {text!r}: {key!r} is unknown; {name} has {known}")
        try:
            parameters[key] = float(number)
        except ValueError:
            raise UserError(f"divergence {text!r}: {key} must be a number") from None
        check_share(key, parameters[key])
    return name, parameters


def _forms() -> Iterator[str]:
    for name, parameters in DIVERGENCES.items():
        defaults = ",".join(f"{key}={value:g}" for key, value in parameters.items())
        yield f"{name}[:{defaults}]" if defaults else name


def _is_read_by(split: Callable[[str], Any]) -> Callable[[str], bool]:
    def is_read(text: str) -> bool:
        try:
            split(text)
        except UserError:
            return False
        return True

    return is_read


_POSITIVE = (lambda v: v > 0), "greater than 0"
_NON_NEGATIVE = (lambda v: v >= 0), "0 or more"
_FRACTION = (lambda v: 0 <= v <= 1), "between 0 and 1"
_BETA = (lambda v: 0 <= v < 1), "at least 0 and below 1"
_UNTAUGHT = ("loss", "student_ce")  # held-out figures, and those that need a teacher
_TAUGHT = ("kl", "divergence", "agreement", "acceptance")
_PRESENT = bool, "set: a GGUF file, a Hugging Face folder or hf:ORG/REPO/FILE"

_RULES: dict[str, _Rule] = {
    "teacher.weights": _choice("auto", *WEIGHTS),
    "teacher.param_dtype": _choice("bfloat16", "float32"),
    "student.path": _PRESENT,
    "student.layers": (
        _is_read_by(split_layers),
        "empty, or whole numbers that rise, such as 0,3,7,23",
    ),
    "student.init": _choice("checkpoint", "random"),
    "data.long": _choice("leave_out", "cut"),
    "student.head": _choice("auto", "tied", "untied"),
    "student.remat": _choice("auto", "none", "dots", "full"),
    "student.block": (
        (lambda v: v in ("", OWN_BLOCK, NEW, DSPARK, EAGLE3)),
        "empty, or one of own (the file's), new, dspark and eagle3 (all drawn by train.seed)",
    ),
    "student.dspark.layers": _POSITIVE,
    "student.dspark.slots": ((lambda v: 1 <= v <= 64), "between 1 and 64"),
    "student.dspark.rank": _NON_NEGATIVE,
    "student.dspark.decay": _POSITIVE,
    "student.dspark.confidence": _NON_NEGATIVE,
    "student.later_drafts": (
        _is_read_by(split_drafts),
        f"empty, or at most {MOST_LATER} numbers above 0, such as 0.6,0.35 for three drafts a pass",
    ),
    "student.draft_ids": _NON_NEGATIVE,
    "student.lora.rank": _NON_NEGATIVE,
    "student.lora.alpha": _POSITIVE,
    "student.lora.weights": _choice("packed", "dense", "float8"),
    "student.lora.learning_rate": _POSITIVE,
    "data.train": (bool, "set: directories, globs or files, joined by commas, or python:PACKAGES"),
    "data.heldout_fraction": ((lambda v: 0 < v < 1), "above 0 and below 1"),
    "data.seq_len": ((lambda v: v >= 2), "2 or more"),
    "data.max_segments": ((lambda v: 1 <= v <= 4096), "between 1 and 4096"),
    "loss.temperature": ((lambda v: 0 < v <= 1e9), "greater than 0, at most 1e9"),
    "loss.alpha": _FRACTION,
    "loss.final_temperature": _NON_NEGATIVE,
    "loss.final_alpha": ((lambda v: v == -1 or 0 <= v <= 1), "-1, or between 0 and 1"),
    "loss.divergence": (
        _is_read_by(split_divergence),
        f"one of {', '.join(_forms())}, a mixture such as 0.5*forward_kl+0.5*reverse_kl, or "
        "a function of a Python file, as mine.py:alpha_divergence",
    ),
    "loss.chunk_tokens": _NON_NEGATIVE,
    "loss.vocabulary": _choice("auto", "same", "shared"),
    "optim.name": _choice("adamw", "muon"),
    "optim.learning_rate": _POSITIVE,
    "optim.final_learning_rate": _NON_NEGATIVE,
    "optim.warmup_steps": _NON_NEGATIVE,
    "optim.weight_decay": _NON_NEGATIVE,
    "optim.beta1": _BETA,
    "optim.beta2": _BETA,
    "optim.eps": _POSITIVE,
    "optim.clip_norm": _NON_NEGATIVE,
    "optim.moment_dtype": _choice("float32", "bfloat16"),
    "train.steps": ((lambda v: 0 < v < 1 << 31), "between 1 and 2147483647"),
    "train.after": _NON_NEGATIVE,
    "train.seconds": _NON_NEGATIVE,
    "train.batch_size": _POSITIVE,
    "train.microbatches": _POSITIVE,
    "train.seed": ((lambda v: 0 <= v < 1 << 32), "between 0 and 4294967295"),
    "train.compute_dtype": _choice("auto", "bfloat16", "float32"),
    "train.reduce_dtype": _choice("bfloat16", "float32"),
    "rollout.writer": _choice("student", "teacher"),
    "rollout.share": ((lambda v: 0 < v <= 1), "above 0 and at most 1"),
    "rollout.every": _POSITIVE,
    "rollout.answers": _POSITIVE,
    "rollout.temperature": _NON_NEGATIVE,
    "rollout.max_tokens": _POSITIVE,
    "rollout.prompt_tokens": _NON_NEGATIVE,
    "rollout.batch_size": _POSITIVE,
    "rollout.stop_growth": ((lambda v: v == 0 or v > 1), "0 or greater than 1"),
    "eval.every": _NON_NEGATIVE,
    "eval.rows": _NON_NEGATIVE,
    "eval.batch_size": _POSITIVE,
    "eval.samples": _NON_NEGATIVE,
    "eval.best": (
        (lambda v: v in ("", *_UNTAUGHT, *_TAUGHT)),
        f"empty, or one of {', '.join((*_UNTAUGHT, *_TAUGHT))}",
    ),
    "eval.stop_worse": _NON_NEGATIVE,
    "checkpoint.every": _NON_NEGATIVE,
    "checkpoint.keep": _POSITIVE,
    "mesh.data": ((lambda v: v == -1 or v > 0), "-1 or greater than 0"),
    "mesh.fsdp": ((lambda v: v >= 0), "0 or more"),
    "mesh.tensor": _POSITIVE,
    "log.every": _POSITIVE,
    "log.tracker": (
        (lambda v: not v or (v.partition(":")[0] in TRACKERS and bool(v.partition(":")[2]))),
        f"{', '.join(f'{name}:PROJECT' for name in TRACKERS)}, or empty",
    ),
    "smoke.steps": _NON_NEGATIVE,
}


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Fields that do not go together: where `given` holds, `field` must be as `must` says.

    What a field is, or must be, is a value or a rule. `USER_STUDENT` may stand among the fields of
    a flat config: the class of a user's module.
    """

    field: str
    must: Any
    given: Mapping[str, Any]
    why: str

    def found_in(self, flat: Mapping[str, Any]) -> bool:
        """Whether the fields of a flat config conflict so."""
        given = all(_is(flat.get(name), what) for name, what in self.given.items())
        return given and not _is(flat[self.field], self.must)

    def describe(self, flat: Mapping[str, Any]) -> str:
        """Says in one line what the fields of a flat config are, what they must be, and why."""
        given = " and ".join(_show(name, flat[name]) for name in self.given)
        found = _show(self.field, flat[self.field])
        return f"{found}: must be {_say(self.must)} with {given}: {self.why}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Its row in docs/settings.md: the field, what it must be, with what others, and why."""
        given = ", ".join(f"`{name}`: {_say(what, '`')}" for name, what in self.given.items())
        return f"`{self.field}`", _say(self.must, "`"), given, self.why


USER_STUDENT = "distill(student=)"  # the module that a run is given as Python

_SET: _Rule = bool, "set"
_DRAFTS = "the block drafts for layers that stay as they are"
_NAMED = "it needs an architecture that kdjax knows"
CONFLICTS = (
    Conflict("student.init", "checkpoint", {"student.lora.rank": _SET}, "a base to adapt"),
    Conflict(
        "optim.trainable",
        "",
        {"student.lora.rank": _SET},
        "adapters are what trains, of the matrices that their targets name",
    ),
    Conflict(
        "student.lora.weights",
        _choice("packed", "dense"),
        {"student.quantize": _SET, "student.lora.rank": _SET},
        "adapters are added to the file's numbers, and the sum is rounded",
    ),
    Conflict(
        "student.quantize",
        _SET,
        {"student.imatrix": _SET},
        "importances weigh the errors of rounding",
    ),
    Conflict("student.quantize", _SET, {"student.start": _SET}, "its scales are of block types"),
    Conflict("student.imatrix", "", {"student.start": _SET}, "its scales are fitted already"),
    Conflict("student.init", "checkpoint", {"student.start": _SET}, "it has the numbers"),
    Conflict("student.lora.rank", 0, {"student.start": _SET}, "its masters are all numbers"),
    Conflict("teacher.path", SELF, {"student.block": _SET}, _DRAFTS),
    Conflict("teacher.cache", "", {"student.block": _SET}, _DRAFTS),
    Conflict("student.init", "checkpoint", {"student.block": _SET}, _DRAFTS),
    Conflict("student.layers", "", {"student.block": _SET}, _DRAFTS),
    Conflict("student.quantize", "", {"student.block": _SET}, _DRAFTS),
    Conflict("student.lora.rank", 0, {"student.block": _SET}, _DRAFTS),
    Conflict("optim.trainable", "", {"student.block": _SET}, _DRAFTS),
    Conflict("rollout.prompts", "", {"student.block": _SET}, _DRAFTS),
    Conflict("mesh.tensor", 1, {"student.block": _SET}, _DRAFTS),
    Conflict(
        "student.dspark.confidence",
        0,
        {"student.block": DSPARK, "loss.alpha": 1},
        "the teacher says which drafts it accepts, and alpha=1 leaves it out",
    ),
    Conflict(
        "student.dspark.confidence",
        0,
        {"student.block": DSPARK, "student.dspark.rank": 0},
        "a head without a bias (DFlash) predicts no acceptance",
    ),
    Conflict("student.block", _SET, {"student.later_drafts": _SET}, "a block drafts them"),
    Conflict(
        "student.later_drafts",
        "",
        {"student.block": DSPARK},
        "a head drafts all tokens of a pass at once",
    ),
    Conflict(
        "student.block",
        EAGLE3,
        {"student.draft_ids": _SET},
        "other heads draft all ids, as llama.cpp runs them",
    ),
    Conflict(
        "student.init", "checkpoint", {"teacher.path": SELF}, "the teacher is the student's file"
    ),
    Conflict(
        "loss.alpha",
        1,
        {"teacher.path": "", "teacher.cache": ""},
        "there is no teacher: name one (teacher.path: a GGUF file or a Hugging Face folder; or "
        "teacher.cache: a cache of a server's answers), or train on the text alone",
    ),
    Conflict(
        "eval.best",
        (lambda v: v in ("", *_UNTAUGHT), f"empty, or one of {', '.join(_UNTAUGHT)}"),
        {"teacher.path": "", "teacher.cache": ""},
        "there is no teacher to compare with",
    ),
    Conflict(
        "loss.final_alpha",
        (lambda v: v in (-1, 1), "-1 or 1"),
        {"loss.alpha": 1},
        "the run trains without the teacher from its start; begin below 1",
    ),
    Conflict(
        "teacher.weights",
        (lambda v: v not in ("dense", "packed"), "auto, or float8 of a cache made in float8"),
        {"teacher.cache": _SET},
        "a cached teacher is not loaded",
    ),
    Conflict(
        "teacher.cache",
        "",
        {"rollout.prompts": _SET},
        "a cache has no outputs for the answers of a round",
    ),
    Conflict(
        "rollout.writer",
        "student",
        {"rollout.prompts": _SET, "teacher.path": ""},
        "no teacher runs, so none can write",
    ),
    Conflict("student.layers", "", {USER_STUDENT: _SET}, _NAMED),
    Conflict("student.quantize", "", {USER_STUDENT: _SET}, _NAMED),
    Conflict("student.lora.rank", 0, {USER_STUDENT: _SET}, _NAMED),
    Conflict("student.block", "", {USER_STUDENT: _SET}, _NAMED),
    Conflict("rollout.prompts", "", {USER_STUDENT: _SET}, _NAMED),
)


def _is(value: Any, what: Any) -> bool:
    """Whether a value is as a rule, or another value, says."""
    return bool(what[0](value)) if isinstance(what, tuple) else value == what


def _say(what: Any, mark: str = "") -> str:
    """A rule in words, or a value between marks."""
    if isinstance(what, tuple):
        return what[1]
    return f"{mark}{what!r}{mark}" if what != "" else "empty"


def _show(name: str, value: Any) -> str:
    return f"distill(student={value})" if name == USER_STUDENT else f"{name}={value!r}"


def _list_conflicts(flat: Mapping[str, Any]) -> list[str]:
    return [conflict.describe(flat) for conflict in CONFLICTS if conflict.found_in(flat)]


def say_why(field: str, other: str) -> str:
    """Says why a field does not go with another, as the row of `CONFLICTS` does."""
    return next(row.why for row in CONFLICTS if row.field == field and other in row.given)


def refuse_conflicts(flat: Mapping[str, Any]) -> None:
    """Raises one `UserError` of all conflicts between the fields of a flat config."""
    if problems := _list_conflicts(flat):
        raise UserError(_refusal(problems))


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A field's limit in terms of others, which `must` shows by their names in braces."""

    field: str
    holds: Callable[[Config], bool]
    must: str

    def describe(self, config: Config) -> str:
        shown = self.must.format_map(vars(config))
        return f"{_show(self.field, flatten(config)[self.field])}: must be {shown}"


_BOUNDS = (
    _Bound(
        "train.batch_size",
        lambda c: c.train.microbatches < 1 or not c.train.batch_size % c.train.microbatches,
        "divisible by train.microbatches={train.microbatches}",
    ),
    _Bound(
        "optim.final_learning_rate",
        lambda c: c.student.lora.rank > 0 or c.optim.final_learning_rate <= c.optim.learning_rate,
        "at most optim.learning_rate={optim.learning_rate}",
    ),
    _Bound(
        "optim.final_learning_rate",
        lambda c: (
            c.student.lora.rank < 1 or c.optim.final_learning_rate <= c.student.lora.learning_rate
        ),
        "at most student.lora.learning_rate={student.lora.learning_rate}",
    ),
    _Bound(
        "train.after",
        lambda c: not c.train.after >= c.train.steps > 0,
        "less than train.steps={train.steps}, the last step of the run that goes on",
    ),
    _Bound(
        "optim.warmup_steps",
        lambda c: not c.optim.warmup_steps >= c.train.steps - c.train.after > 0,
        "less than train.steps={train.steps} - train.after={train.after}; lower it (0: no warmup), "
        "or raise train.steps",
    ),
    _Bound(
        "smoke.steps",
        lambda c: not c.smoke.steps > c.train.steps > 0,
        "at most train.steps={train.steps}, the run that it tries",
    ),
    _Bound(
        "rollout.max_tokens",
        lambda c: (
            not c.rollout.prompts
            or c.data.seq_len - c.rollout.max_tokens >= max(c.rollout.prompt_tokens, 1)
        ),
        "less than data.seq_len={data.seq_len} by rollout.prompt_tokens={rollout.prompt_tokens}, "
        "or by 1: answers are not cut in two",
    ),
    _Bound(
        "rollout.share",
        lambda c: not c.rollout.prompts or count_own_rows(c) >= 1,
        "at least one row of a batch of train.batch_size={train.batch_size}",
    ),
)


def _say_odd(value: Any, default: Any) -> str:
    """Says which type a field's value must have, by its default; empty if it has it.

    A whole number may replace a float, a list a tuple.
    """
    kinds: Any = type(default)
    if isinstance(default, float) and not isinstance(value, bool):
        kinds = (int, float)
    elif isinstance(default, tuple):
        kinds = (tuple, list)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        return f"must be of type {type(default).__name__}"
    return "" if not isinstance(value, float) or math.isfinite(value) else "must be finite"


def check_fields(config: Config) -> None:
    """Raises one `UserError` that lists unknown fields, and every value of a wrong type."""
    check_type("config", config, Config, "a kdjax.Config")
    if problems := _list_odd_fields(config, Config(), ""):
        raise UserError(_refusal(problems))


def _list_odd_fields(section: Any, default: Any, prefix: str) -> list[str]:
    names, problems = [field.name for field in dataclasses.fields(default)], []
    for name, value in vars(section).items():
        shown = f"{prefix}{name}={value!r}"
        if name not in names:
            gone = refuse_removed(f"{prefix}{name}")
            problems.append(gone or f"{shown}: no such field.{suggest(name, names, prefix)}")
        elif odd := _say_odd(value, getattr(default, name)):
            problems.append(f"{shown}: {odd}")
        elif dataclasses.is_dataclass(value):
            problems += _list_odd_fields(value, getattr(default, name), f"{prefix}{name}.")
    return problems


def validate(config: Config) -> None:
    """Raises one `UserError` that lists every invalid field, its value and valid ones."""
    check_fields(config)
    refuse_removed_weights(config.teacher.weights)
    flat = flatten(config)
    problems = [
        f"{name}={flat[name]!r}: must be {wanted}"
        for name, (good, wanted) in _RULES.items()
        if not good(flat[name])
    ]
    problems += _list_conflicts(flat)
    problems += [bound.describe(config) for bound in _BOUNDS if not bound.holds(config)]
    if problems:
        raise UserError(_refusal(problems))


def _refusal(problems: Sequence[str]) -> str:
    return "the config cannot run:\n  " + "\n  ".join(problems)
