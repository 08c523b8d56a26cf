"""Runs a run's teacher once over its rows and stores on the disk what training needs of it.

    kdjax cache --config=qwen1p5b_0p5b --out=cache --k=64
    kdjax train --config=qwen1p5b_0p5b --config.teacher.cache=cache --workdir=runs/a

The config and other flags are the run's: the rows of its steps and of its evaluations are cached,
with `--all` every row of the text. The command of a longer run adds the rows that it reads.
`topk` stores the top-k ids of each position, for the configured temperature alone; `hidden` stores
the last hidden states, for any temperature. The same command continues one that was stopped.
Processes that an engine started share the rows; the first writes.

With `--from=answers.jsonl` no teacher runs: the log-probabilities of a server's answers are stored,
and runs train on these answers: `--config.data.train=answers.jsonl --config.teacher.path=`.

`kdjax cache --list` shows what else kdjax stores on this machine, `kdjax cache --clear` removes it.
"""

import argparse
import functools
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kdjax.commands.parsing import (
    Parser,
    add_cluster_flags,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
    started,
)
from kdjax.config import DataConfig
from kdjax.data import teacher_cache
from kdjax.device.runtime import PROGRAMS
from kdjax.errors import FINISHED, PEER_LOST, UserError, reporting
from kdjax.formats.files import check_folder
from kdjax.hub import HEADERS, fetch_files
from kdjax.training.caching import cache_answers, cache_teacher
from kdjax.training.job import survey
from kdjax.training.teachers import CachedHidden, CachedTopK


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--(list|clear|yes)\b", argument) for argument in argv):
        return manage(argv)
    parser = run_parser("cache", __doc__, PEER_LOST)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    kinds = "top-k ids of each position, or its last hidden state"
    parser.add_argument("--kind", choices=teacher_cache.KINDS, default="topk", help=kinds)
    ids = "ids a position, for --kind=topk; 64, with --from all of them"
    parser.add_argument("--k", type=int, help=ids)
    text = "a server's answers with log-probabilities, in place of a teacher"
    parser.add_argument("--from", dest="answers", metavar="FILE", help=text)
    text = "for --from: the probability outside the k ids is on all other ids, or shared by the k"
    parser.add_argument("--rest", choices=("tail", "absent"), help=text)
    parser.add_argument(
        "--all", action="store_true", help="every row, not only the rows of the steps"
    )
    add_cluster_flags(parser)
    _add_store_flags(parser.add_argument_group("in place of all others"))
    log_to_terminal()
    run = parse_run(parser, argv)
    options = run.options
    if options.answers:
        if options.kind != "topk":
            parser.error("--from: answers have no hidden states; leave --kind out")
        if options.all:
            parser.error("--from: all answers are kept; leave --all out")
        run.config.data.train, run.config.teacher.path = options.answers, ""
    elif options.rest:
        parser.error("--rest is for --from: a teacher knows the probability of every id")
    if options.kind == "hidden" and options.k is not None:
        parser.error("--k is for --kind=topk: hidden states have no ids; leave it out")
    require_files(run)
    check_folder(options.out)  # before the text is packed
    kind = CachedHidden()
    if options.kind == "topk":
        kind = CachedTopK(64 if options.k is None else options.k)
    with started(options, lean=True):
        config = fetch_files(run.config, check=functools.partial(survey, whole=False))
        if options.answers:
            cache_answers(config, options.out, options.k, rest=options.rest or "tail")
        else:
            cache_teacher(config, options.out, kind, all_rows=options.all)
    return FINISHED


class Store(NamedTuple):
    """A folder in which kdjax stores what it can make again, or has to download again."""

    folder: Path
    entry: str  # pattern of the names in it that are kdjax's
    holds: str
    lost: str  # what its removal costs

    def list_entries(self) -> list[Path]:
        """The files and folders that are stored; what a process is writing is none of them."""
        folder = self.folder.expanduser()
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        return [path for path in entries if re.fullmatch(self.entry, path.name)]


STORES = {
    "rows": Store(
        Path(DataConfig().cache_dir),
        r"[0-9a-f]{64}",
        "packed rows of texts",
        "the next run packs its text again; a run that an earlier version began may not go on",
    ),
    "headers": Store(
        HEADERS, r"[0-9a-f]{64}-\d+", "headers of the Hub's models", "a plan downloads them again"
    ),
    "programs": Store(PROGRAMS, r".+", "compiled programs", "the next run compiles again"),
}


def measure(path: Path) -> int:
    """Bytes of a file, or of all files under a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _add_store_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags by which `manage` lists and clears the stores."""
    add = parser.add_argument
    add("--list", action="store_true", help="show what kdjax stores on this machine")
    text = f"stores to remove, of {','.join(STORES)}; without names all of them"
    add("--clear", nargs="?", const=",".join(STORES), metavar="NAMES", help=text)
    add("--yes", action="store_true", help="remove; without it --clear says what it would remove")


def manage(argv: Sequence[str]) -> int:
    """Lists or clears the stores; returns the exit status."""
    parser = Parser("cache", "Lists or removes what kdjax stores on this machine.")
    _add_store_flags(parser)
    options = parser.parse_args(argv)
    if options.yes and not options.clear:
        parser.error("--yes is for --clear; leave it out")
    names = ",".join(STORES)
    chosen = (options.clear or names).split(",")
    if unknown := [name for name in chosen if name not in STORES]:
        raise UserError(f"--clear={options.clear}: found {unknown[0]!r}; expected some of {names}.")
    print("\n".join(clear(chosen, remove=options.yes) if options.clear else list_stores()))
    return FINISHED


def list_stores() -> Iterator[str]:
    """Yields a line a store, and one of the Hub's own cache."""
    for name, store in STORES.items():
        entries = store.list_entries()
        size = sum(map(measure, entries)) / 1e9
        said = f"{store.holds}, {len(entries):,}"
        yield f"{name:<9} {size:7.2f} GB  {store.folder.expanduser()}: {said}"
    from huggingface_hub.constants import HF_HUB_CACHE

    size = measure(Path(HF_HUB_CACHE)) / 1e9 if Path(HF_HUB_CACHE).is_dir() else 0
    yield f"{'':<9} {size:7.2f} GB  {HF_HUB_CACHE}: of the Hub; `hf cache` lists and removes"


def clear(names: Sequence[str], *, remove: bool) -> Iterator[str]:
    """Yields a line a store; removes what is stored there if `remove`."""
    for name in names:
        store = STORES[name]
        entries = store.list_entries()
        size = sum(map(measure, entries)) / 1e9
        for path in entries if remove else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        said = "removed" if remove else "to remove"
        yield f"{name}: {len(entries):,} {said}, {size:.2f} GB, in {store.folder.expanduser()}"
        yield f"  {store.lost}"
    if not remove:
        yield f"Nothing was removed. To remove it: kdjax cache --clear={','.join(names)} --yes"
