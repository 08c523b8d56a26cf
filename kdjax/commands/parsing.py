"""Reads command lines for all commands: flags, the config of a run, the environment."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from absl import flags
from absl import logging as absl_logging
from ml_collections import config_flags

from kdjax import config as config_module
from kdjax import hub, recipes
from kdjax.config import (
    CONFLICTS,
    SELF,
    WEIGHTS,
    Config,
    check_fields,
    flatten,
    read_weights,
    refuse_removed,
    validate,
)
from kdjax.data.fields import Fields
from kdjax.data.sources import find_files, split_sources
from kdjax.device import cluster
from kdjax.device.cluster import JOIN_TIMEOUT
from kdjax.errors import (
    BAD_INPUT,
    FINISHED,
    NOT_WRITTEN,
    QUIT,
    STATUSES,
    MissingFileError,
    UserError,
    suggest,
    suggest_path,
)
from kdjax.formats import open_shapes
from kdjax.formats.imatrix import read_importance
from kdjax.formats.start import check_start
from kdjax.models.checkpoint import Checkpoint

# The variables of this version, of earlier ones and of the reference system; the first set counts.
WEIGHTS_VARIABLES = "KDJAX_TEACHER_WEIGHTS", "KDJAX_TEACHER_BACKEND", "APR_DISTILL_TEACHER_BACKEND"
PROMPT = "--prompt='The'"  # of suggested commands: a story, an article or a comment goes on from it
_log = logging.getLogger("kdjax")
DEGENERATE_VARIABLE = "KDJAX_ALLOW_DEGENERATE_KD"
_SPACED = re.compile(r"(--?\w[\w.-]*)=.*\s", re.DOTALL)  # a flag whose value has a space
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")
_ILLEGAL = re.compile(r"flag --config\.([^=]+)=(.*?): ", re.DOTALL)
_KINDS = {"int": "whole number", "float": "number", "bool": "true or false"}
_FIELD = re.compile(r"^    (\w+): (?:str|int|float|bool) = ([^#\n]*?)(?:  # (.*))?$", re.MULTILINE)


# The meaning of status 0, by command.
FINISHES = {
    "train": "trained to the last step; of a smoke run: passed; with --plan: the run fits",
    "plan": "the run fits, or the device does not report its memory",
    "data": "the text is counted and the rows are shown",
    "cache": "all rows of the run are stored; the stores are listed, or cleared",
    "evaluate": "all is measured, and the model shows no damage (with --no-health: measured)",
    "lm_eval": "the harness has finished; its tables have the figures",
    "generate": "the text is complete, or as long as --max-tokens allows",
    "answers": "the answers are in --out",
    "draft": "the draft is trained, judged and in --out; with --plan: its training fits",
    "shrink": "the file is in --out, within the size; with --plan: the work fits",
    "imatrix": "the matrix is in --out",
    "export": "the files are in --out, read back and equal",
    "push": "uploaded in one commit",
    "report": "the page is written",
    "verify": "every check of the receipt holds",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help in which each flag with a default shows it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        without = default is None or isinstance(default, bool) or default in ("", [])
        if without or default == argparse.SUPPRESS or "default" in text:
            return text
        shown = f"{default:g}" if isinstance(default, float) else "%(default)s"
        return f"{text} (default: {shown})"


class Parser(argparse.ArgumentParser):
    """Flags of one command. Help is the command's docstring, its flags and its exit statuses."""

    def __init__(self, name: str, description: str | None, *statuses: int, epilog: str = ""):
        """`statuses` are exit statuses in addition to those of every command."""
        ends = sorted({FINISHED, BAD_INPUT, NOT_WRITTEN, QUIT, *statuses})
        meanings = STATUSES | {FINISHED: FINISHES.get(name, "finished")}
        lines = "\n".join(f"  {status:>3}  {meanings[status]}" for status in ends)
        super().__init__(
            prog=f"kdjax {name}",
            description=description,
            epilog=f"{epilog}exit status:\n{lines}",
            formatter_class=_Help,
            allow_abbrev=False,  # else a flag of a later version changes what a prefix means
        )
        self.register("type", float, _read_number)

    def error(self, message: str) -> NoReturn:
        """Raises `UserError`, which the command reports like any other."""
        stop = "" if message.endswith(("?", ".")) else "."
        raise UserError(f"{message}{stop} `{self.prog} --help` lists the flags.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and names the flag that an unknown one may have meant."""
        options, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does; refuses a flag with a value that is given twice.

        Refuses unknown flags if one is missing: it may be misspelt.

        A flag of no name here is unknown too if its value has a space, where argparse would take
        all of it for a positional argument, such as a path.
        """
        args = list(sys.argv[1:] if args is None else args)
        self._refuse_repeated(args)
        spaced = [text for text in args if self._is_unknown_and_spaced(text)]
        args = [text for text in args if text not in spaced]
        try:
            options, unknown = super().parse_known_args(args, namespace)
        except UserError:
            for action in self._actions:
                action.required = False
            for group in self._mutually_exclusive_groups:
                group.required = False
            _, unknown = super().parse_known_args(args, namespace)
            self.refuse_beside_fields([*spaced, *unknown])
            raise
        return options, [*spaced, *unknown]

    def _refuse_repeated(self, args: Sequence[str]) -> None:
        """Raises `UserError` for a flag of one value that is there twice: argparse takes the last.

        Overrides of a config are not its flags; of those the last counts, as absl has it.
        """
        given = list[argparse.Action]()
        for text in args[: args.index("--") if "--" in args else None]:
            action = self._option_string_actions.get(name := text.partition("=")[0])
            if isinstance(action, argparse._StoreAction):
                if action in given:
                    self.error(f"found {name} twice; expected one value. Leave one out")
                given.append(action)

    def _is_unknown_and_spaced(self, text: str) -> bool:
        match = _SPACED.match(text)
        return match is not None and match[1] not in self._option_string_actions

    def refuse_beside_fields(self, unknown: Sequence[str]) -> None:
        """Does what `refuse` does, but for `--config.field=value`."""
        self.refuse([text for text in unknown if not _OVERRIDE.match(text)])

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raises `UserError` if any argument was not understood."""
        if not unknown:
            return
        for text in unknown:
            if gone := refuse_removed(f"{self.prog} {text.partition('=')[0]}"):
                self.error(gone)
        first = unknown[0].partition("=")[0]
        known = [text for text in self._option_string_actions if text.startswith("--")]
        hint = suggest(first, known) if first.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}".rstrip("."))


def _read_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a finite number")
    return number


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raises `UserError` for the first of these flags that is below its least value."""
    for name, number in least.items():
        if (value := getattr(args, name)) is not None and value < number:
            raise UserError(f"--{name.replace('_', '-')}={value:g} must be {number} or more.")


def check_seq_len(args: argparse.Namespace, checkpoint: Checkpoint, name: str = "model") -> None:
    """Raises `UserError` for a --seq-len beyond the positions that the model knows."""
    if args.seq_len > (most := checkpoint.spec.max_positions):
        raise UserError(f"--seq-len={args.seq_len}: the {name} has {most} positions; lower it.")


def find_work(given: Path | None, out: Path, suffix: str) -> Path:
    """Names the folder of a file's parts: `given`, or `out` with a suffix.

    Raises `UserError` where that is `out`.
    """
    work = given or out.with_suffix(suffix)
    if work.absolute() == out.absolute():
        raise UserError(f"{out} is where the parts are stored. Give another --out.")
    return work


class RunCommand(NamedTuple):
    """A command line that names a config."""

    options: argparse.Namespace
    config: Config  # with every `--config.field=value` and the environment in it
    name: str  # of the config, such as "demo" or "demo-baseline"
    downloads: dict[str, str]  # path in the shipped config: the command that downloads it
    suits_cpu: bool = False  # by the config: an idle GPU is no error


def run_parser(name: str, description: str | None, *statuses: int, bare: bool = False) -> Parser:
    """Adds the flags of a command that takes a config; `parse_run` reads them.

    With `bare` the config may also be named without a flag.
    """
    parser = Parser(name, description, *statuses, epilog=_settings())
    text = f"a file with get_config(), or one that comes with kdjax: {', '.join(shipped())}"
    add = parser.add_mutually_exclusive_group().add_argument
    add("--config", metavar="CONFIG[:KIND]", help=text)
    if bare:
        text = "in place of --config=CONFIG"
        add("config", nargs="?", default=argparse.SUPPRESS, metavar="CONFIG", help=text)
    return parser


def read_paths(text: str) -> str:
    """Checks the value of a flag that names text, for argparse, which names the flag."""
    if not any(split_sources(text)):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected folders, globs or files, joined by commas"
        )
    return text


def add_fields_flag(add: Callable[..., object]) -> None:
    """Adds the flag that names the columns of records."""
    text = "columns of records, as data.fields takes them: user=question,assistant=answer"
    add("--fields", default="", type=_check_columns, metavar="NAME=COLUMN,...", help=text)


def _check_columns(text: str) -> str:
    try:
        Fields.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_cluster_flags(parser: Parser) -> None:
    """Adds the flags by which processes that an engine started join."""
    add = parser.add_argument
    text = "auto joins the processes that srun, mpirun, torchrun, ... started; off: alone"
    add("--distributed", default="auto", choices=("auto", "off"), help=text)
    text = "how long processes wait for each other"
    add("--join_timeout", type=int, default=JOIN_TIMEOUT, metavar="SECONDS", help=text)


def parse_run(parser: Parser, argv: Sequence[str] | None = None) -> RunCommand:
    """Reads the command line and the config; raises `UserError` for what cannot run."""
    options, rest = parser.parse_known_args(argv)
    if not options.config:
        if rest and (rest[0].partition(":")[0] in shipped() or rest[0].endswith(".py")):
            parser.error(f"found {rest[0]} without a flag; expected --config={rest[0]}")
        parser.refuse_beside_fields(rest)
        parser.error(f"--config is missing: a file, or one of {', '.join(shipped())}")
    config, name, downloads, suits_cpu = load_config(options.config)
    config = override(config, rest, parser)
    apply_environment(config, os.environ)
    validate(config)
    return RunCommand(options, config, name, downloads, suits_cpu)


# --- configs ------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """Configs that come with kdjax, by name: of the wheel, or of the checkout around it."""
    package = Path(__file__).parents[1]
    folders = package / "configs", package.parent / "configs"
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def load_config(text: str) -> tuple[Config, str, dict[str, str], bool]:
    """Reads the config of `FILE[:KIND]` or `NAME[:KIND]`; returns it with its name.

    Returns also what makes files, by path (`DOWNLOADS`), and `SUITS_CPU`. Raises
    `MissingFileError` for a name that is neither a file nor a shipped config, `UserError` for a
    file that fails or returns no `Config`.
    """
    file, colon, kind = text.rpartition(":")
    if not colon or Path(text).is_file():
        file, colon, kind = text, "", ""
    path = Path(file)
    if not path.is_file():
        names = shipped()
        if file not in names:
            known, found = ", ".join(names), "a folder" if path.is_dir() else "no such file"
            near = suggest_path(file) or suggest(path.stem, names)
            raise MissingFileError(
                f"--config={text}: {found}; expected a Python file with get_config() -> "
                f"Config, or a config that comes with kdjax: {known}.{near}"
            )
        path = names[file]
    try:
        module = runpy.run_path(str(path))
        if "get_config" not in module:
            raise UserError(f"{path}: found no get_config(); expected one that returns a Config.")
        config = module["get_config"](*([kind] if colon else []))
    except (UserError, OSError):
        raise
    except Exception as error:  # user code: name its line
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = f":{frames[-1].lineno}" if frames else ""
        raise UserError(f"{path}{line}: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config() returned {config!r}; expected a kdjax Config.")
    name = f"{path.stem}-{kind}" if kind else path.stem
    downloads = recipes.DOWNLOADS | module.get("DOWNLOADS", {})
    return config, name, downloads, module.get("SUITS_CPU", False)


def override(config: Config, argv: Sequence[str], parser: Parser) -> Config:
    """Copies the config with each `--config.field=value` set, parsed as the field's type."""
    check_fields(config)
    fields = flatten(config)
    for arg in argv:
        match = _OVERRIDE.match(arg)
        if match and match[1] not in fields:
            raise UserError(_unknown_field(match[1], fields))
    values = flags.FlagValues()
    program = [parser.prog]
    try:
        flag = config_flags.DEFINE_config_dataclass(
            "config", config, flag_values=values, sys_argv=[*program, *argv]
        )
        parser.refuse(values([*program, *argv])[1:])
    except flags.UnrecognizedFlagError as error:
        parser.refuse([f"--{error.flagname}"])
    except flags.IllegalFlagValueError as error:
        match = _ILLEGAL.match(str(error))
        if match is None or match[1] not in fields:
            raise UserError(str(error)) from error
        kind = type(fields[match[1]]).__name__
        raise UserError(
            f"--config.{match[1]}={match[2]}: found no {_KINDS.get(kind, kind)}; expected one, as "
            f"in --config.{match[1]}={fields[match[1]]}."
        ) from error
    except flags.Error as error:
        raise UserError(str(error)) from error
    flags.FLAGS.mark_as_parsed()  # Grain reads its flags, which keep their defaults
    return flag.value


def _unknown_field(wrong: str, fields: Iterable[str]) -> str:
    """Lists fields that exist: the nearest one, then the fields of its section.

    Of a removed field it says what to do instead.
    """
    if gone := refuse_removed(wrong):
        return f"--config.{gone}."
    section = wrong.partition(".")[0]
    near = [name for name in fields if name.startswith(f"{section}.")]
    if not near:
        sections = list(dict.fromkeys(name.partition(".")[0] for name in fields))
        hint = suggest(wrong, fields, "--config.") or suggest(section, sections, "--config.")
        return f"--config.{wrong}: no such field.{hint} Sections are {', '.join(sections)}."
    if wrong == section:
        return f"--config.{wrong} is a section; set a field of it: {', '.join(near)}."
    names = [name.removeprefix(f"{section}.") for name in near]
    hint = suggest(wrong.removeprefix(f"{section}."), names, f"--config.{section}.")
    return f"--config.{wrong}: no such field.{hint} The fields of {section} are {', '.join(near)}."


def describe_fields() -> dict[str, dict[str, tuple[str, str]]]:
    """Section -> field -> (default as it is written, its comment), of `kdjax.config`."""
    sections = {n: x for n, x in vars(Config()).items() if dataclasses.is_dataclass(x)}
    return {name: _describe_section(fields) for name, fields in sections.items()}


def _describe_section(section: Any) -> dict[str, tuple[str, str]]:
    """Fields of a section, then of the sections within it, such as `lora.rank`."""
    described = {
        name: (default.strip(), text)
        for name, default, text in _FIELD.findall(_read_classes()[type(section).__name__])
    }
    for name, inner in vars(section).items():
        if dataclasses.is_dataclass(inner):
            fields = _describe_section(inner).items()
            described |= {f"{name}.{field}": entry for field, entry in fields}
    return described


@functools.cache
def _read_classes() -> dict[str, str]:
    """Source of each class of `kdjax.config`; `inspect.getsource` parses all of it for each."""
    source = inspect.getsource(config_module)
    lines = source.splitlines(keepends=True)
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


def describe_conflicts() -> list[str]:
    """Rows of a table, in Markdown: field, what it must be, with which others, why."""
    return [f"| {' | '.join(conflict.cells)} |" for conflict in CONFLICTS]


def _settings() -> str:
    lines = ["settings, each a flag --config.SECTION.FIELD=VALUE (docs/settings.md):"]
    for section, fields in describe_fields().items():
        for name, (default, text) in fields.items():
            lines.append(f"  {f'{section}.{name}={default}':<44} {text}")
    return "\n".join([*lines, "", ""])


# --- the environment ----------------------------------------------------------------------------


def apply_environment(config: Config, environ: Mapping[str, str]) -> None:
    """Lets KDJAX_TEACHER_WEIGHTS and KDJAX_ALLOW_DEGENERATE_KD override the config.

    Raises `UserError` for an unknown value. Only commands read the environment.
    """
    name, *others = [*filter(environ.get, WEIGHTS_VARIABLES), ""]
    if name:
        weights, valid = read_weights(environ[name]), ("auto", *WEIGHTS)
        if weights not in valid:
            raise UserError(f"{name}={environ[name]!r}: must be one of {', '.join(valid)}")
        for other in filter(None, others):
            if environ[other] != environ[name]:
                _log.warning(
                    "%s=%s has no effect: %s=%s counts", other, environ[other], name, environ[name]
                )
        if config.teacher.cache and weights in ("dense", "packed"):
            raise UserError(
                f"{name}={environ[name]} and teacher.cache={config.teacher.cache}: a cached "
                f"teacher is not loaded. Unset {name}, or leave the cache out (teacher.cache=)."
            )
        _log.info("teacher.weights=%s, as %s=%s says", weights, name, environ[name])
        config.teacher.weights = weights
    allow_degenerate(config, environ)


def allow_degenerate(config: Config, environ: Mapping[str, str]) -> None:
    """Lets KDJAX_ALLOW_DEGENERATE_KD override the config; raises `UserError` but for 0 and 1."""
    allowed = environ.get(DEGENERATE_VARIABLE)
    if allowed not in (None, "", "0", "1"):
        raise UserError(f"{DEGENERATE_VARIABLE}={allowed!r}: must be 1 or 0.")
    config.teacher.allow_degenerate = config.teacher.allow_degenerate or allowed == "1"


# --- files and logs -----------------------------------------------------------------------------


def require_files(run: RunCommand, *, text: bool = True) -> None:
    """Raises one `MissingFileError` that names every file of the run that this machine lacks.

    Each comes with its remedy: a command of the config's `DOWNLOADS`, or the message of opening
    it. Files of the Hub are not checked, and with `text=False` text files are not. Raises
    `UserError` for a `student.imatrix` or a `student.start` that is no such file.
    """
    config, missing = run.config, dict[str, list[str]]()  # remedy: the fields that need it
    models = {
        "teacher.path": "" if config.teacher.path == SELF else config.teacher.path,
        "student.path": config.student.path,
        "student.imatrix": config.student.imatrix,
        "student.start": config.student.start,
        "data.tokenizer": config.data.tokenizer,
    }
    texts = {"data.train": config.data.train, "data.heldout": config.data.heldout}
    texts["rollout.prompts"] = config.rollout.prompts
    if not text:
        texts = {}
    readers = {"student.imatrix": read_importance, "student.start": check_start}
    for field, path in (models | texts).items():
        here = ",".join(p for p in path.split(",") if not p.strip().startswith(hub.PREFIX))
        try:
            if here and field in texts:
                find_files(here, Fields.parse(config.data.fields))
            elif here and field in readers:
                readers[field](here)
            elif here and not Path(here).exists():
                open_shapes(here)
        except MissingFileError as error:
            remedy = run.downloads.get(path) or str(error)
            missing.setdefault(remedy, []).append(f"--config.{field}={path}")
    if missing:
        lines = [f"  {', '.join(fields)}\n    {remedy}" for remedy, fields in missing.items()]
        raise MissingFileError(
            "files of this run are missing. Download each with the command below it, or set the "
            "field to a local file:\n" + "\n".join(lines)
        )


def started(
    options: argparse.Namespace | None = None, *, lean: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Calls `cluster.started` with the flags of `add_cluster_flags`, or alone without them."""
    if options is None:
        return cluster.started("off", lean=lean)
    return cluster.started(options.distributed, options.join_timeout, lean=lean)


class _Lines(logging.Handler):
    """Prints to `sys.stderr` as it is then: a progress bar puts itself there, below each line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_terminal(level: int = logging.INFO) -> None:
    """Shows kdjax's log from `level` on, with the time, and warnings of other packages."""
    # Libraries log through absl at INFO (Orbax a dozen lines a save); kdjax does not use absl.
    absl_logging.set_verbosity(absl_logging.WARNING)
    handler = _Lines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("kdjax")
    log.handlers, log.propagate = [handler], False
    log.setLevel(level)
