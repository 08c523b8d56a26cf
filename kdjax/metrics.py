"""Reduced numbers as (sum, count) pairs: merged over batches, divided once."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kdjax.head import EvalSums


def held_out_figures(
    sums: Iterable[EvalSums], temperature: float, covered: int = 0
) -> dict[str, float]:
    """Merges batches' sums (host floats, float64 here) into the held-out figures, in nats a token.

    Perplexity is exp of the merged mean, never a mean of perplexities. `covered` is the UTF-8 bytes
    of all the targets: with it there are bits per byte, without a teacher no figure that needs one.
    """
    columns = [column for column in zip(*sums, strict=True)]
    totals: list[Any] = [
        None if None in column else math.fsum(float(x) for x in column) for column in columns
    ]
    total = EvalSums(*totals)
    if float(total.count) == 0:
        raise ZeroDivisionError("no held-out position carries weight")
    mean = {k: v / float(total.count) for k, v in total._asdict().items() if v is not None}
    figures: dict[str, float] = {}
    for side in ("student", "teacher"):
        if (ce := mean.get(f"{side}_ce")) is not None:
            figures |= {f"{side}_ce": ce, f"{side}_perplexity": math.exp(min(ce, 700.0))}
            if covered:
                bits = ce * float(total.count) / math.log(2)
                figures[f"{side}_bits_per_byte"] = bits / covered
    if "kl" in mean:
        figures |= {name: mean[name] for name in ("kl", "kl_temperature", "agreement")}
        figures["temperature"] = temperature
    figures |= {"bytes": float(covered)} if covered else {}
    return figures | {"tokens": float(total.count)}


def step_figures(raw: Mapping[str, float]) -> dict[str, float]:
    """One optimizer step's means from its sums: `loss`, `ce`, `kl`, and the rest as they are."""
    count = max(raw["count"], 1.0)
    figures = {name: raw[name] / count for name in ("loss", "ce", "kl") if name in raw}
    figures |= {name: raw[name] for name in ("grad_norm", "learning_rate")}
    return figures | {"tokens": raw["count"]}
