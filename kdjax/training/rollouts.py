"""On-policy training data: answers written in rounds, by the current student.

`Author` writes a round, `AnswerSource` is the batch source that draws from rounds. A round is on
the disk before the first of its steps trains, so that a killed run goes on with it.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.config import (
    Config,
    RolloutConfig,
    count_own_rows,
    count_prompt_positions,
)
from kdjax.data.fields import NAMED, Fields
from kdjax.data.pipeline import News, Source, TextSource, example, stack_examples
from kdjax.data.rollouts import (
    ROUND,
    Answer,
    Prompt,
    Prompts,
    Room,
    Round,
    measure_answers,
    read_prompts,
    read_round,
    round_path,
    rounds_folder,
    write_round,
)
from kdjax.data.rows import Rows
from kdjax.data.sources import find_files
from kdjax.data.text import openings
from kdjax.device.cluster import exchange, first_before_others
from kdjax.errors import CheckError, UserError
from kdjax.losses.kd import KDLoss
from kdjax.models.decoder import DecoderFunctions, Params
from kdjax.models.decoding import Sampling, complete
from kdjax.models.model import Model, cast_params
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.identity import describe_answers
from kdjax.training.judging import compare, describe_tokens
from kdjax.training.pair import Pair
from kdjax.training.saving import checksums

_log = logging.getLogger("kdjax")

PROBES, SHOWN = 8, 3  # prompts that every round answers: for comparison, and shown in the log
_PROBE_NUMBERS = 2**31 - 1 - PROBES  # random numbers of these answers: no other answer has them
_MEASURED = 256  # prompts whose mean length estimates how many answers fill a round
_SURPLUS = 1.05  # times the expected number of answers: a second call costs more
_COMPARED_TEMPLATES = 64  # prompts


@dataclasses.dataclass(frozen=True)
class Author:
    """Writes rounds of answers to prompts, and has the teacher read a few."""

    config: Config
    student: Model  # `write` gets its parameters
    prompts: Prompts
    tokenizer: Tokenizer
    real: int  # ids that both models have
    teacher: Model | None = None  # one that runs; None: no answer is compared
    loss: KDLoss | None = None  # its divergence compares; None: the config's

    @property
    def room(self) -> Room:
        """The rows of a round."""
        config = self.config
        rows = count_own_rows(config) * config.rollout.every
        return Room(rows, config.data.seq_len + 1, config.data.max_segments)

    def describe(self, number: int, student: str, first: int) -> dict[str, Any]:
        """Describes what decides a round's rows; `student` is a hash, `first` a prompt's number."""
        return {
            "round": number,
            "student": student,
            "seed": self.config.train.seed,
            "prompts": self.prompts.key,
            "first": first,
            "settings": describe_answers(self.config),
        }

    def write(
        self, params: Params, number: int, first: int, expected: float | None = None
    ) -> tuple[Rows, dict[str, Any]]:
        """The rows of round `number`, from prompt `first` on, and what is to be recorded of them.

        `expected` is how long the answers may be on average (default: half of the longest): how
        many are asked for at once depends on it, the rows do not.
        Raises `UserError` if no answer can be trained on.
        """
        begun = time.perf_counter()
        settings, room = self.config.rollout, self.room
        student = self.student.replace(params=cast_params(self.student, params))
        writer = self.teacher if settings.writer == "teacher" else student
        assert writer is not None  # `answer_source` asks for a teacher that writes
        # The same in every round, with the same draws, and always the student's.
        asked = [self.prompts[n] for n in range(PROBES)] if self.teacher is not None else []
        together = asked if writer is student else []  # a call of their own would take as long
        drawn, kept, probes = self._draw(writer, number, first, expected, together)
        rows, count = room.pack([drawn[i] for i in kept], (self.config.train.seed, number))
        used = drawn[: kept[count - 1] + 1]
        ids = sum(len(drawn[i].ids) for i in kept[:count])
        figures = measure_answers(used)
        figures |= {"padding": 1 - ids / (room.rows * room.row_length)}
        figures |= {"tokens": float(rows.mask.sum())}
        if writer is not student:
            probes = self._complete(student, asked, _number_probes(asked))
        compared, shown = self._compare(student, probes)
        seconds = time.perf_counter() - begun
        _log.info(
            "round %d: %d answers of %.0f tokens on average, %.0f%% cut off, %.1f%% padding; "
            "%.1f s, %.0f tokens/s",
            number,
            len(used),
            figures["length"],
            100 * figures["cut_off"],
            100 * figures["padding"],
            seconds,
            sum(len(a.log_probs) for a in drawn) / seconds,
        )
        if number == 0 and settings.train_cut and figures["cut_off"] >= 0.5:
            _log.warning(
                "most answers of round 0 are cut off at rollout.max_tokens=%d and train without "
                "an end, which may unlearn ends: raise it until few are.",
                settings.max_tokens,
            )
        following = first + -(-len(used) // settings.answers)
        return rows, {"next": following, "figures": figures | compared, "samples": shown}

    def _draw(
        self,
        writer: Model,
        number: int,
        first: int,
        expected: float | None,
        asked: Sequence[Prompt],
    ) -> tuple[list[Answer], list[int], list[Answer]]:
        """Draws answers until those that train fill a round.

        Returns the answers, the numbers of those that train, and the answers to the prompts
        `asked`, which are written along with the first of them.
        """
        settings, room = self.config.rollout, self.room
        drawn, kept, probes = list[Answer](), list[int](), list[Answer]()
        following = map(self.prompts.__getitem__, range(first, first + _MEASURED))
        mean = np.mean([len(prompt.ids) for prompt in following])
        mean += expected or settings.max_tokens / 2
        while not room.is_filled([drawn[i] for i in kept]):
            missing = room.rows * room.row_length - sum(len(drawn[i].ids) for i in kept)
            count = max(int(_SURPLUS * (missing / mean)), 1)
            start = first * settings.answers + len(drawn)
            numbers: Sequence[int] = range(start, start + count)
            prompts = [self.prompts[n // settings.answers] for n in numbers]
            if not drawn:
                prompts, numbers = [*prompts, *asked], [*numbers, *_number_probes(asked)]
            written = self._complete(writer, prompts, numbers)
            drawn, probes = drawn + written[:count], probes or written[count:]
            kept = [i for i, a in enumerate(drawn) if settings.train_cut or not a.cut]
            if not kept:
                raise UserError(
                    f"all {len(drawn)} answers of round {number} are cut off at rollout.max_tokens="
                    f"{settings.max_tokens}, and rollout.train_cut is False: nothing would train. "
                    "Raise the one or set the other."
                )
            mean = sum(len(drawn[i].ids) for i in kept) / len(drawn)
        return drawn, kept, probes

    def _complete(
        self, writer: Model, prompts: Sequence[Any], numbers: Sequence[int]
    ) -> list[Answer]:
        settings = self.config.rollout
        sampling = Sampling(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            stop_ids=tuple(i for i in self.tokenizer.stop_ids if i < self.real),
            seed=self.config.train.seed,
        )
        assert isinstance(writer.functions, DecoderFunctions)
        with writer.precision():
            completions = complete(
                writer.functions,
                writer.params,
                [prompt.ids for prompt in prompts],
                sampling,
                real=self.real,
                spread=writer.spread,
                batch_size=settings.batch_size,
                room=count_prompt_positions(self.config) + settings.max_tokens,  # as any round's
                numbers=numbers,
            )
        return [
            Answer.of(prompt, c.ids, c.log_probs, cut=c.reason == "length")
            for prompt, c in zip(prompts, completions, strict=True)
        ]

    def _compare(
        self, student: Model, probes: Sequence[Answer]
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Compares teacher and student on the probes; describes the first probes token by token."""
        if self.teacher is None or not any(len(probe.own) for probe in probes):
            return {}, []
        asked = self.config.loss
        loss = self.loss or KDLoss(asked.divergence, asked.temperature)
        prompts = [probe.ids[: probe.start].tolist() for probe in probes]
        answers = [probe.own.tolist() for probe in probes]
        # One width in every round: another would compile another program.
        width = self.config.rollout.max_tokens
        filled = [ids + [0] * (width - len(ids)) for ids in answers]
        with student.precision():
            compared = compare(self.teacher, student, prompts, filled, self.real, loss)
        real = np.arange(width)[None] < np.asarray([len(ids) for ids in answers])[:, None]
        figures = {
            "overlap": float(compared.overlap[real].mean()),
            "divergence": float(compared.divergence[real].mean()),
        }
        shown = []
        for row, (prompt, ids) in enumerate(zip(prompts[:SHOWN], answers, strict=False)):
            tokens = describe_tokens(self.tokenizer, ids, compared.students[row], compared, row)
            for token, divergence in zip(tokens, compared.divergence[row], strict=False):
                token["divergence"] = float(divergence)
            ended = "length" if probes[row].cut else "stop"
            text = self.tokenizer.decode(prompt)
            shown.append({"prompt": text, "ended_by": ended, "tokens": tokens})
        return figures, shown


def _number_probes(asked: Sequence[Any]) -> Sequence[int]:
    """Random numbers for the answers to these prompts."""
    return range(_PROBE_NUMBERS, _PROBE_NUMBERS + len(asked))


class AnswerSource(Source):
    """Batches of answers, the student's or the teacher's, mixed with text.

    Answers come first in a batch. A round lasts `rollout.every` batches. Each of several processes
    makes the full batch and takes consecutive rows of it, so that a device has the same rows
    however devices are split.
    """

    def __init__(
        self,
        author: Author,
        text: TextSource | None,  # of full batches
        workdir: Path,
        *,
        mark: Callable[..., dict[str, np.ndarray]] | None = None,  # see `Vocabulary.mark_answers`
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._author, self._text, self._mark = author, text, mark
        self._folder = rounds_folder(workdir)
        self._index, self._count = process_index, process_count
        self._batches = self._first = 0  # drawn; the next round's first prompt
        self._round: Round | None = None
        self._news: News | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The SHA-256, in hex, of all prompts."""
        return {"rollout.prompts": self._author.prompts.key}

    def _place(self) -> tuple[int, int]:
        """The round, and the batch of it, that come next."""
        return divmod(self._batches, self._author.config.rollout.every)

    @property
    def pauses(self) -> bool:
        """Whether the next batch is of another round than the last one, to be written first."""
        return self._round is None or self._round.record["round"] != self._place()[0]

    def next(self, params: Any) -> dict[str, np.ndarray]:
        """Returns the next batch; first writes a round with `params` if the last one is over."""
        number, at = self._place()
        if self.pauses:
            self._round = self._begin_round(number, params)
            self._first = self._round.record["next"]
        held = self._round
        assert held is not None
        settings = self._author.config
        own = count_own_rows(settings)
        batch = stack_examples([example(held.rows, row) for row in range(at * own, (at + 1) * own)])
        if self._text is not None:
            others = self._text.next()
            batch = {name: np.concatenate([x, others[name]]) for name, x in batch.items()}
        batch = self._mark(batch, own) if self._mark else batch
        self._batches += 1
        share = settings.train.batch_size // self._count
        mine = slice(self._index * share, (self._index + 1) * share)
        return {name: x[mine] for name, x in batch.items()}

    def _begin_round(self, number: int, params: Any) -> Round:
        """Returns this student's round, from the disk if this student wrote the one there."""
        begun = time.perf_counter()
        path = round_path(self._folder, number)
        sums = json.dumps(checksums(params), sort_keys=True).encode()
        made_of = self._author.describe(number, hashlib.sha256(sums).hexdigest(), self._first)
        written = _read_same(path, made_of)
        if not _all_have(f"round {number}", written):
            before = self._round.record["figures"]["length"] if self._round else None
            rows, record = self._author.write(params, number, self._first, before)
            with first_before_others(f"round {number}"):  # no process trains before the file exists
                if self._index == 0:
                    written = write_round(path, rows, made_of | record)
                else:
                    written = read_round(path)
        assert written is not None
        seconds = time.perf_counter() - begun  # not stored in the file: it varies
        figures = {"round": float(number), **written.record["figures"], "seconds": seconds}
        self._news = News(ROUND, figures)
        return written

    def take_news(self) -> News | None:
        """Figures of a round that began with the latest batch, once; None if none did."""
        news, self._news = self._news, None
        return news

    def get_state(self) -> dict[str, Any]:
        """The position before the next batch, and the hash of the round that it lies in."""
        number, _ = self._place()
        within = self._round and self._round.record["round"] == number
        return {
            "batches": self._batches,
            "first": self._first,
            "round": self._round.sha256 if self._round and within else None,
            "text": self._text.get_state() if self._text is not None else None,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves a fresh source to a position of `get_state`.

        Raises `CheckError` if the round's answers are not on the disk as they were written.
        """
        self._batches, self._first = state["batches"], state["first"]
        if self._text is not None:
            self._text.set_state(state["text"])
        if state["round"] is None:
            return
        path = round_path(self._folder, self._place()[0])
        advice = (
            "The student that wrote it has changed since: put a copy of the file back, or use "
            "another workdir to begin anew."
        )
        try:
            self._round = read_round(path)
        except CheckError as error:
            raise CheckError(f"{error} {advice}") from error
        if self._round.sha256 != state["round"]:
            raise CheckError(
                f"{path} has SHA-256 {self._round.sha256}; the checkpoint expects "
                f"{state['round']}. {advice}"
            )


def _read_same(path: Path, made_of: dict[str, Any]) -> Round | None:
    """Reads the round on the disk if its record is equal; else None, and it is written again."""
    try:
        found = read_round(path)
    except CheckError as error:
        if path.exists():
            _log.warning("%s It is written again.", error)
        return None
    return found if made_of.items() <= found.record.items() else None


def _all_have(name: str, found: Round | None) -> bool:
    """Whether all processes found an equal round; if one did not, all write."""
    hashes = set(exchange(name, found and found.sha256))
    return len(hashes) == 1 and None not in hashes


def open_prompts(config: Config, tokenizer: Tokenizer) -> Prompts:
    """Reads the prompts that `rollout.prompts` names, cut and counted."""
    return read_prompts(
        config.rollout.prompts,
        tokenizer,
        count_prompt_positions(config),
        config.train.seed,
        parse_special=config.data.parse_special,
        fields=Fields.parse(config.data.fields),
    )


def check_templates(
    rollout: RolloutConfig, ours: Tokenizer, theirs: Tokenizer, fields: Fields = NAMED
) -> None:
    """Raises `UserError` if the teacher's chat template differs from the student's.

    Only a warning with `rollout.allow_other_template`.
    """
    if ours.chat_template is None or ours.chat_template == theirs.chat_template:
        return
    differing = _find_differing(rollout.prompts, ours, theirs, fields)
    if differing is None:
        return
    message = (
        "the chat templates of teacher and student differ. A prompt becomes\n  "
        f"student: {differing[0]!r}\n  teacher: {differing[1]!r}"
        + "\nThe teacher reads the student's template, which it was not trained on."
    )
    if not rollout.allow_other_template:
        raise UserError(
            f"{message} Choose models of one template, or accept it with "
            "rollout.allow_other_template=True."
        )
    _log.warning("%s", message)


def _find_differing(
    prompts: str, ours: Tokenizer, theirs: Tokenizer, fields: Fields
) -> tuple[str, str] | None:
    """The first prompt that the two render differently, in both renderings; None if none."""
    files = find_files(prompts, fields)
    rendered = (one.text for one in openings(files, ours, fields) if one.chat)
    if theirs.chat_template is None:
        first = next(rendered, None)
        return None if first is None else (first, "(no template)")
    others = (one.text for one in openings(files, theirs, fields) if one.chat)
    pairs = zip(rendered, others, strict=False)
    for _, (mine, other) in zip(range(_COMPARED_TEMPLATES), pairs, strict=False):
        if mine != other:
            return mine, other
    return None


def answer_source(
    config: Config,
    workdir: Path,
    pair: Pair,
    student: Model,
    teacher: Model | None,
    text: TextSource | None,
    loss: KDLoss | None = None,
) -> AnswerSource:
    """Makes the batch source of a run whose answers are written in rounds.

    Raises `UserError` for answers of a teacher that does not run, and for prompts that cannot be
    read.
    """
    reads = teacher is not None and isinstance(teacher.functions, DecoderFunctions)
    if config.rollout.writer == "teacher" and not reads:
        raise UserError(
            "found rollout.writer='teacher' and a teacher that does not run as a decoder; expected "
            "one that does: dense, packed or float8."
        )
    author = Author(
        config,
        student,
        open_prompts(config, pair.tokenizer),
        pair.tokenizer,
        pair.vocabulary.real,
        teacher if reads else None,
        loss,
    )
    _log.info("prompts: %d, at most %d tokens", len(author.prompts), count_prompt_positions(config))
    place = dict(process_index=jax.process_index(), process_count=jax.process_count())
    return AnswerSource(author, text, workdir, mark=pair.vocabulary.mark_answers, **place)
