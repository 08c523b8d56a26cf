"""Reduced numbers as (sum, count) pairs: merged over batches, divided once."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kdjax.head import EvalSums


def held_out_figures(sums: Iterable[EvalSums], temperature: float) -> dict[str, float]:
    """Merges batches' sums (host floats, float64 here) into the held-out figures, in nats a token.

    Perplexity is exp of the merged mean, never a mean of perplexities.
    """
    totals: list[Any] = [math.fsum(float(x) for x in column) for column in zip(*sums, strict=True)]
    total = EvalSums(*totals)
    if float(total.count) == 0:
        raise ZeroDivisionError("no held-out position carries weight")
    mean = {name: float(value) / float(total.count) for name, value in total._asdict().items()}
    return {
        "student_ce": mean["student_ce"],
        "student_perplexity": math.exp(min(mean["student_ce"], 700.0)),
        "teacher_ce": mean["teacher_ce"],
        "teacher_perplexity": math.exp(min(mean["teacher_ce"], 700.0)),
        "kl": mean["kl"],
        "kl_temperature": mean["kl_temperature"],
        "temperature": temperature,
        "agreement": mean["agreement"],
        "tokens": float(total.count),
    }


def step_figures(raw: Mapping[str, float]) -> dict[str, float]:
    """One optimizer step's means from its sums: `loss`, `ce`, `kl`, and the rest as they are."""
    count = max(raw["count"], 1.0)
    figures = {name: raw[name] / count for name in ("loss", "ce", "kl")}
    figures |= {name: raw[name] for name in ("grad_norm", "learning_rate")}
    return figures | {"tokens": raw["count"]}
