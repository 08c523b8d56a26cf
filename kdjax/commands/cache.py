"""Runs a run's teacher once over its rows and stores on the disk what training needs of it.

    kdjax cache --config=qwen1p5b_0p5b --out=cache --k=64
    kdjax train --config=qwen1p5b_0p5b --config.teacher.cache=cache --workdir=runs/a

The config and other flags are the run's: the rows of its steps and all held-out rows are cached,
with `--all` every row of the text. The command of a longer run adds the rows that it reads.
`topk` stores the top-k ids of each position, for the configured temperature alone; `hidden` stores
the last hidden states, for any temperature. The same command continues one that was stopped.
Processes that an engine started share the rows; the first writes.

With `--from=answers.jsonl` no teacher runs: the log-probabilities of a server's answers are stored,
and runs train on these answers: `--config.data.train=answers.jsonl --config.teacher.path=`.
"""

import functools
from pathlib import Path

from kdjax.commands.parsing import (
    add_cluster_flags,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
    started,
)
from kdjax.data import teacher_cache
from kdjax.errors import FINISHED, PEER_LOST, reporting
from kdjax.hub import fetch_files
from kdjax.training.caching import cache_answers, cache_teacher
from kdjax.training.job import survey
from kdjax.training.teachers import CachedHidden, CachedTopK


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
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
