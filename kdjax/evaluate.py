"""Evaluation of a model: held-out text, a teacher, HumanEval and MBPP, and whether it is broken.

    python -m kdjax.evaluate runs/a --data=corpus/heldout --teacher=teacher.gguf@q4k
    python -m kdjax.evaluate student.gguf --humaneval=HumanEval.jsonl.gz --mbpp=mbpp.jsonl

TARGET is a workdir (its newest checkpoint), a step folder of one, a GGUF or .apr file, or a Hugging
Face folder. FORM is dequant (the default), q4k or fp8, then nothing or :bfloat16 or :float32.

Exit status: 0 done, 2 bad input, 8 the model does not run (pass@k is 0 then), 9 it runs and is
broken: the evidence is printed.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

from kdjax.head import EvalSums
from kdjax.head_cached import TopEvalSums
from kdjax.metrics import held_out_figures
from kdjax.models.decoder import Params


def held_out(
    eval_step: Callable[..., EvalSums | TopEvalSums],
    params: Params,
    teacher: Params,
    batches: Iterable[dict[str, Any]],
    temperature: float,
    covered: int = 0,
) -> dict[str, float]:
    """Figures over all batches, in nats a token: cross-entropies, KL at T and at 1, agreement.

    `covered`, the UTF-8 bytes of the batches' targets, adds bits per byte.
    Sums stay on the device until the last batch was dispatched.
    """
    sums = [eval_step(params, teacher, batch) for batch in batches]
    return held_out_figures(jax.device_get(sums), temperature, covered)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    from kdjax.evaluation import command  # training needs nothing of it

    return command.main(argv, "python -m kdjax.evaluate", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
