"""Runs a run's teacher once over all its rows and keeps on the disk what training needs of it.

    kdjax cache --config=qwen1p5b_0p5b --out=cache --k=64
    kdjax train --config=qwen1p5b_0p5b --config.teacher.cache=cache --workdir=runs/a

The config is the run's own, other flags included. `topk` keeps the k likeliest ids of each
position, for the configured temperature alone; `hidden` the last hidden states, for any. The same
command continues one that was stopped. Processes that an engine started share the rows; the first
writes.
"""

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
from kdjax.training.caching import cache_teacher
from kdjax.training.teachers import CachedHidden, CachedTopK


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = run_parser("cache", __doc__, PEER_LOST)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    kinds = "likeliest ids of each position, or its last hidden state"
    parser.add_argument("--kind", choices=teacher_cache.KINDS, default="topk", help=kinds)
    parser.add_argument("--k", type=int, default=64, help="ids a position, of --kind=topk")
    add_cluster_flags(parser)
    run = parse_run(parser, argv)
    log_to_terminal()
    config = require_files(run)
    kind = CachedTopK(run.options.k) if run.options.kind == "topk" else CachedHidden()
    with started(run.options, lean=True):
        cache_teacher(config, run.options.out, kind)
    return FINISHED
