"""`samples.json`: the student's completions before and after training, judged by the teacher.

The student continues the same held-out prompts greedily each time. Then the teacher reads each
completion once: its most probable id at each position, and its probability of the student's id.
"""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.data.rows import Rows
from kdjax.device.placement import Placement
from kdjax.formats.files import replacing
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params
from kdjax.models.decoding import Completion, LoopWriter, Sampling, write_answers
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.hooks import Hook, Run
from kdjax.training.judging import Judged, describe_tokens, judge
from kdjax.watch.report.workdir import SAMPLES

_log = logging.getLogger("kdjax")

FORMAT = 1  # raise when a field changes its meaning
PROMPT_TOKENS, NEW_TOKENS = 64, 48


def choose(rows: Rows, count: int) -> list[dict[str, Any]]:
    """Chooses at most `count` prompts from evenly spread rows: half of a row's longest document.

    A prompt has 1 to `PROMPT_TOKENS` ids; `reference` is how the text goes on.
    """
    count = min(count, len(rows))
    chosen = []
    for index in ((np.arange(count) + 0.5) * len(rows) / max(count, 1)).astype(int):
        segments = rows.segments[index]
        longest = np.bincount(segments)[1:].argmax() + 1
        ids = rows.tokens[index][segments == longest].tolist()
        cut = min(PROMPT_TOKENS, len(ids) // 2)
        chosen.append(dict(row=int(index), prompt=ids[:cut], reference=ids[cut : cut + NEW_TOKENS]))
    return chosen


class Samples(Hook):
    """Writes `workdir/samples.json`; a pure function of the parameters, which changes no result.

    A resumed run keeps the completions from before training. Without a teacher the tokens are not
    judged. Errors here are logged and do not end the run.
    """

    def __init__(
        self,
        workdir: Path,
        count: int,
        student: ModelFunctions,
        teacher: Model | None,
        tokenizer: Tokenizer,
        rows: Rows,
        placement: Placement | None = None,
    ):
        self._path, self._count, self._rows = workdir / SAMPLES, count, rows
        self._student, self._teacher, self._tokenizer = student, teacher, tokenizer
        self._placement = placement
        self._samples: list[dict[str, Any]] = []
        self._last = 0

    def train_begin(self, run: Run) -> None:
        """Reads the samples of an earlier session, or chooses prompts."""
        self._last = run.total_steps
        self._samples = (run.start_step and self._read_earlier()) or [
            {
                "row": chosen["row"],
                "prompt_ids": chosen["prompt"],
                "prompt": self._tokenizer.decode(chosen["prompt"], start=True),
                "reference": self._tokenizer.decode(chosen["reference"]),
                "before": None,
                "after": None,
            }
            for chosen in choose(self._rows, self._count)
        ]

    def _read_earlier(self) -> list[dict[str, Any]]:
        try:
            document = json.loads(self._path.read_text())
            samples = document["samples"]
            if document["format"] == FORMAT and all("prompt_ids" in s for s in samples):
                return samples
            problem = f"no samples of format {FORMAT}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
        _log.warning("%s: %s; there will be none from before training", self._path, problem)
        return []

    def student(self, step: int, params: Params) -> None:
        """Writes completions before the first step and after the last."""
        if step not in (0, self._last):
            return
        try:
            prompts = [sample["prompt_ids"] for sample in self._samples]
            described = self._describe(prompts, self._complete(prompts, params))
            for sample, completion in zip(self._samples, described, strict=True):
                sample["before" if step == 0 else "after"] = {"step": step} | completion
            if jax.process_index() != 0:  # other processes only compute their rows
                return
            document = {"format": FORMAT, "samples": self._samples}
            with replacing(self._path) as file:
                file.write(json.dumps(document, indent=1).encode() + b"\n")
        except Exception as error:  # missing samples must not end a run of hours
            _log.warning("no samples at step %d: %s: %s", step, type(error).__name__, error)

    def _complete(self, prompts: list[list[int]], params: Params) -> list[Completion]:
        tokenizer = self._tokenizer
        student = Model(
            self._student,
            params,
            tokenizer.vocab_size,
            placement=self._placement,
            own_tokenizer=tokenizer,
        )
        sampling = Sampling(max_tokens=NEW_TOKENS, stop_ids=tokenizer.stop_ids)
        one = student.as_writer("generate")
        writer = LoopWriter(one.functions, one.real, one.spread)
        settings: dict[str, Any] = dict(tokenizer=tokenizer, batch_size=len(prompts))
        with student.precision():
            return write_answers(writer, params, prompts, sampling, **settings)

    def _judge(self, prompts: list[list[int]], completions: list[Completion]) -> Judged | None:
        """The teacher's judgement, if a teacher runs and there is a token to judge."""
        if self._teacher is None or not any(c.ids for c in completions):
            return None
        if not isinstance(self._teacher.functions, DecoderFunctions):
            _log.info("samples without the teacher's opinion: %s has no decoder", self._teacher)
            return None
        ids = [c.ids for c in completions]
        return judge(self._teacher, prompts, ids, self._tokenizer.vocab_size)

    def _describe(
        self, prompts: list[list[int]], completions: list[Completion]
    ) -> list[dict[str, Any]]:
        """Describes how each completion ended, and its tokens as student and teacher judge them."""
        judged = self._judge(prompts, completions)
        return [
            {
                "ended_by": completion.reason,
                "tokens": describe_tokens(
                    self._tokenizer, completion.ids, np.exp(completion.log_probs), judged, row
                ),
            }
            for row, completion in enumerate(completions)
        ]
