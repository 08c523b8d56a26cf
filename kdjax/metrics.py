"""Reduced numbers as (sum, count) pairs: merged over batches, divided once."""

import math
from collections.abc import Mapping, Sequence

from kdjax.head import EvalSums
from kdjax.head_cached import TopEvalSums


def held_out_figures(
    sums: Sequence[EvalSums | TopEvalSums], temperature: float
) -> dict[str, float]:
    """Merges batches' sums (host floats, float64 here) into the held-out figures, in nats a token.

    Perplexity is exp of the merged mean, never a mean of perplexities. Against a cache of likeliest
    ids the KLs are called `kl_topk` and `kl_topk_temperature`: they are lower bounds.
    """
    totals = [math.fsum(float(x) for x in column) for column in zip(*sums, strict=True)]
    fields = type(sums[0])._fields if sums else EvalSums._fields
    total = dict(zip(fields, totals, strict=True)) if sums else {"count": 0.0}
    if total["count"] == 0:
        raise ZeroDivisionError("no held-out position carries weight")
    mean = {name: value / total["count"] for name, value in total.items()}
    return {
        "student_ce": mean["student_ce"],
        "student_perplexity": math.exp(min(mean["student_ce"], 700.0)),
        "teacher_ce": mean["teacher_ce"],
        "teacher_perplexity": math.exp(min(mean["teacher_ce"], 700.0)),
        **{name: value for name, value in mean.items() if name.startswith("kl")},
        "temperature": temperature,
        "agreement": mean["agreement"],
        "tokens": total["count"],
    }


def step_figures(raw: Mapping[str, float]) -> dict[str, float]:
    """One optimizer step's means from its sums: `loss`, `ce`, `kl`, and the rest as they are."""
    count = max(raw["count"], 1.0)
    figures = {name: raw[name] / count for name in ("loss", "ce", "kl")}
    figures |= {name: raw[name] for name in ("grad_norm", "learning_rate")}
    return figures | {"tokens": raw["count"]}
