"""A model's own writing as text to train on, where no text was given: sampled at T = 1.

Half of the texts are conversations: the model goes on from its chat template where a user's turn
begins, and answers its question (Magpie: Xu et al. 2024, arXiv:2406.08464). The others begin
as any document does, from BOS. Where there is no template all do.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kdjax.data.conversations import Conversation
from kdjax.data.sources import split_sources
from kdjax.errors import UserError
from kdjax.evaluation.answers import PromptRecord, WrittenAnswers, group
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoding import Sampling, find_room
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

_WORD = re.compile(r"own(?::(.*))?", re.DOTALL)
_TEXTS = {"cpu": 32, "gpu": 4096}  # texts that `own` stands for, by platform
LONGEST = 512  # ids of a text or an answer
QUESTION = 128  # ids of a user's turn
_HERE = "\ue000"  # a message that no template has in its own words: where a turn begins


class OwnText(NamedTuple):
    """Files of a model's own writing, in a folder, and the sources that are read with them."""

    folder: Path
    texts: int  # 0: as many as suit the platform, by `fill`
    others: str  # as for `data.train`; "": none

    @classmethod
    def find(cls, sources: str, folder: Path) -> "OwnText | None":
        """Reads the word `own`, or `own:N` for N texts, among `sources`; None without it.

        Raises `UserError` for no number of two or more, and for a folder whose name ends a source.
        """
        paths, packages = split_sources(sources)
        words = [match for path in paths if (match := _WORD.fullmatch(path))]
        if not words:
            return None
        word, number = words[-1][0], words[-1][1]
        if number is not None and not (number.isdecimal() and int(number) > 1):
            raise UserError(f"found {word}; expected 2 texts or more, such as own:64.")
        if "," in str(folder):
            raise UserError(
                f"found {word} and the folder {folder}, whose files are named between commas; "
                "expected a folder without one. Name another --work."
            )
        rest = [path for path in paths if not _WORD.fullmatch(path)]
        python = [f"python:{','.join(packages)}"] if packages else []
        return cls(folder, int(number or 0), ",".join(rest + python))

    def fill(self, platform: str) -> "OwnText":
        """Chooses the number of texts by the platform, `cpu` or `gpu`, if the word names none."""
        return self if self.texts else self._replace(texts=_TEXTS[platform])

    def name_sources(self, tokenizer: Tokenizer) -> str:
        """The files and the other sources, as for `data.train`."""
        files = [self._documents] + [self._answers] * bool(_begin_turn(tokenizer))
        return ",".join([*map(str, files), *filter(None, [self.others])])

    def count_ids(self) -> int:
        """Ids that are written at most."""
        return self.texts * (LONGEST + QUESTION // 2)

    @property
    def _documents(self) -> Path:
        return self.folder / "own-documents.jsonl"

    @property
    def _questions(self) -> Path:
        return self.folder / "own-questions.jsonl"

    @property
    def _answers(self) -> Path:
        return self.folder / "own-answers.jsonl"

    def write(self, checkpoint: Checkpoint, load: Callable[[], Model], batch_size: int) -> None:
        """Writes the files, or goes on; loads the checkpoint's model by `load` if one is missing.

        Raises `UserError` for files of another model or number of texts.
        """
        tokenizer = checkpoint.tokenizer
        begin = PromptRecord(tuple(_begin_document(tokenizer)))
        turn, chats = _begin_turn(tokenizer), 0
        parts = _Parts(checkpoint, functools.cache(load), batch_size, self.texts)
        if turn:
            chats = self.texts // 2
            opened = PromptRecord(tuple(tokenizer.encode(turn)))
            parts.write(self._questions, [opened] * chats, QUESTION, 1)
            asked = list(_read_questions(self._questions, tokenizer))
            parts.write(self._answers, asked, LONGEST, 2)
        parts.write(self._documents, [begin] * (self.texts - chats), LONGEST, 3)


def _begin_document(tokenizer: Tokenizer) -> list[int]:
    """Ids that begin a document: BOS, or for models without it the end of the document before."""
    return tokenizer.open_text([]) or [tokenizer.end_of_text_id]


def _begin_turn(tokenizer: Tokenizer) -> str:
    """A rendered conversation up to where a user's words begin; "" without a template."""
    if tokenizer.chat_template is None:
        return ""
    try:
        whole = Conversation(({"role": "user", "content": _HERE},)).render(tokenizer)
    except UserError:  # a template of other messages
        return ""
    before, here, _ = whole.partition(_HERE)
    return before if here else ""


def _read_questions(file: Path, tokenizer: Tokenizer) -> Iterable[PromptRecord]:
    for line in file.read_text().splitlines():
        chat = Conversation(({"role": "user", "content": json.loads(line)["text"].strip()},))
        ids = tokenizer.encode(chat.render(tokenizer, answer_next=True))
        yield PromptRecord(tuple(ids), chat)


class _Parts(NamedTuple):
    """Writes the files of one model."""

    checkpoint: Checkpoint
    load: Callable[[], Model]
    batch_size: int
    texts: int

    def write(self, out: Path, prompts: Sequence[PromptRecord], most: int, seed: int) -> None:
        """Writes at most `most` ids after each prompt; goes on after the last group of a call."""
        spec, stop_ids = self.checkpoint.spec, self.checkpoint.tokenizer.stop_ids
        answers = WrittenAnswers(out, {"MODEL": self.checkpoint.sha256, "own": self.texts})
        prompts = [prompt for prompt in prompts if 2 * len(prompt.ids) <= spec.max_positions]
        most = min(most, spec.max_positions // 2)
        sampling = Sampling(most, 1.0, 1.0, seed=seed, stop_ids=stop_ids)
        room = find_room([len(prompt.ids) for prompt in prompts], most)
        for part in group(prompts[answers.asked :], self.batch_size, 1):
            size = self.batch_size
            answers.write(part, self.load(), sampling, batch_size=size, room=room)
            _log.info("%s: %s", out, answers.describe(len(prompts)))
