"""Shows what a run trains on: counts of its text, and rows with what carries loss.

    kdjax data demo
    kdjax data my_config.py --rows=4 --config.data.train=chat.jsonl
    kdjax data my_config.py --rows=2 | less -R

Reads the text and the headers of the models, and makes the run's rows, which the run then finds
ready. In colour, tokens with loss are green; without colour they stand in ⟦brackets⟧. The rows are
those that the run's first step reads. Where the teacher's chat template would write a conversation
otherwise than the student's, which both read, its view is shown, too.
"""

import difflib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from kdjax.commands.parsing import (
    RunCommand,
    check_least,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
)
from kdjax.config import Config
from kdjax.errors import FINISHED, MissingFileError, reporting
from kdjax.hub import fetch_headers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kdjax.data.rows import Rows, RowSet
    from kdjax.models.tokenizer import Tokenizer
    from kdjax.training.pair import Pair

_COMPARED = 64  # conversations whose renderings by both templates are compared
_LOSS, _MARK = "bold green", "reverse"


def show_data(config: Config, rows: int) -> None:
    """Prints the counts of a config's text and its first rows; makes them if they are not there."""
    from rich.console import Console

    from kdjax.training.inputs import count_run, prepare
    from kdjax.training.pair import open_pair

    jax.config.update("jax_platforms", "cpu")  # nothing runs on a GPU
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        pair = open_pair(fetch_headers(config, Path(folder)), whole=False)
        made = prepare(config.data, pair.tokenizer)
        for line in count_run(config, made).lines():
            console.print(line, markup=False)
        for number in list_first(config, made, rows):
            console.print()
            plain = not console.color_system
            console.print(draw_row(made.train, number, pair.tokenizer, plain=plain))
        if rows:
            _show_teacher(console, config, pair)


def list_first(config: Config, rows: "RowSet", count: int) -> list[int]:
    """The numbers of the first rows that the run reads, ascending."""
    from kdjax.data.pipeline import list_rows

    count = min(count, len(rows.train))
    numbers = list_rows(len(rows.train), batch_size=1, seed=config.train.seed, batches=count)
    return numbers[:count].tolist()


def draw_row(rows: "Rows", number: int, tokenizer: "Tokenizer", *, plain: bool) -> "Text":
    """A row's text, a document after another; `plain` puts what carries loss in brackets."""
    from rich.text import Text

    ids, segments = rows.tokens[number].tolist(), rows.segments[number].tolist()
    mask = rows.mask[number].tolist()
    # The first token of a document is no target.
    loss = [i > 0 and mask[i] != 0 and segments[i - 1] == segments[i] for i in range(len(ids))]
    used = sum(s > 0 for s in segments)
    said = Text(f"row {number}: {used} of {len(ids)} tokens, {sum(loss)} with loss", "bold")
    for at, group in itertools.groupby(range(used), lambda i: (segments[i], loss[i])):
        some = list(group)
        if some[0] == 0 or segments[some[0] - 1] != at[0]:
            said.append(f"\n[document {at[0]}] ", _MARK)
        text = tokenizer.decode([ids[i] for i in some])
        said.append(f"⟦{text}⟧" if plain and at[1] else text, _LOSS if at[1] else "dim")
    return said


def _show_teacher(console: "Console", config: Config, pair: "Pair") -> None:
    """Prints the first conversation that the teacher's own template would write otherwise."""
    if pair.teacher is None:
        return
    theirs = pair.teacher.tokenizer
    found = next(find_differing(config, pair.tokenizer, theirs), None)
    if found is None:
        return
    place, ours, other = found
    console.print()
    said = f"teacher: it reads the student's template; by its own, {place} would be"
    console.print(said, style="bold", markup=False)
    console.print(draw_difference(ours, other))


def find_differing(
    config: Config, ours: "Tokenizer", theirs: "Tokenizer"
) -> Iterator[tuple[str, str, str]]:
    """Yields conversations that two templates write differently: place and both renderings."""
    from kdjax.data.text import documents
    from kdjax.errors import UserError
    from kdjax.training.inputs import row_settings

    if theirs.chat_template in (None, ours.chat_template):
        return
    settings = row_settings(config.data, ours)
    files = settings.find_files()[0]
    mine, other = (
        (d for d in documents(files, tokenizer, settings.named) if d.content)
        for tokenizer in (ours, theirs)
    )
    try:
        for one, two in itertools.islice(zip(mine, other, strict=False), _COMPARED):
            if one.text != two.text:
                yield one.source, one.text, two.text
    except UserError as error:
        yield str(error).partition(": ")[0], "", f"refused by its own template: {error}"


def draw_difference(ours: str, theirs: str) -> "Text":
    """The teacher's rendering, with what the student's has otherwise in yellow."""
    from rich.text import Text

    said = Text()
    for kind, _, _, start, end in difflib.SequenceMatcher(None, ours, theirs, False).get_opcodes():
        said.append(theirs[start:end], "" if kind == "equal" else "bold yellow")
    return said


def show_run(run: RunCommand, rows: int) -> None:
    """Shows the text of a command line's run."""
    config = run.config
    try:
        require_files(run)
    except MissingFileError:
        if not config.teacher.path:
            raise
        config.teacher.path = ""  # a look needs the text and the student's tokenizer
        require_files(run)
    show_data(config, rows)


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    log_to_terminal()
    parser = run_parser("data", __doc__, bare=True)
    add = parser.add_argument
    add("--rows", type=int, default=2, metavar="N", help="rows to show")
    run = parse_run(parser, argv)
    check_least(run.options, rows=0)
    show_run(run, run.options.rows)
    return FINISHED
