"""Reduced numbers as (sum, count) pairs: merged over batches, divided once."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from kdjax.losses.kd import KDLoss
from kdjax.losses.layers import ExtraSums
from kdjax.losses.positions import EvalSums
from kdjax.losses.shared import OF_COMPARED, SharedEvalSums
from kdjax.losses.topk import TopEvalSums
from kdjax.models.decoder import Params

Sums = EvalSums | TopEvalSums | SharedEvalSums | ExtraSums  # one batch's
_COMPARED = ("divergence", "kl", "acceptance", "compared", "teacher_mass", "student_mass")


def compute_perplexity(ce: float) -> float:
    """exp of the cross-entropy in nats a token; limited to exp(700), since a double overflows."""
    return math.exp(min(ce, 700.0))


def count_bits(nats: float, covered: int) -> float:
    """Bits per byte: `nats` is the sum of cross-entropies, `covered` the targets' UTF-8 bytes."""
    return nats / math.log(2) / covered


def held_out_figures(
    sums: Sequence[EvalSums | TopEvalSums | SharedEvalSums], loss: KDLoss, covered: int = 0
) -> dict[str, float]:
    """Merges batches' sums (host floats, float64 here) into the held-out figures, in nats a token.

    `loss` is the minimised loss, of the cross-entropy and the trained `divergence` at T (with two
    tokenizers the cross-entropy alone where nothing is compared); `kl` is the forward KL at T = 1,
    for any trained divergence. Against a top-k cache the last two are called `divergence_topk` and
    `kl_topk`: they are lower bounds. `acceptance` is the share of the student's drafts that the
    teacher would accept at T = 1; `acceptance_topk` is an upper bound.
    Comparisons are absent without a teacher. Against a teacher of another tokenizer `compared` is
    the share of compared positions; `OF_COMPARED` names the means over these. Perplexity is exp of
    the merged mean, never a mean of perplexities. `covered` is the number of UTF-8 bytes of all
    targets; it adds bits per byte.
    """
    columns = dict(zip(type(sums[0])._fields, zip(*sums, strict=True), strict=True)) if sums else {}
    totals = {
        name: math.fsum(float(x) for x in column)
        for name, column in columns.items()
        if None not in column
    }
    count = totals.get("count", 0.0)
    if count == 0:
        raise ZeroDivisionError("no held-out position carries weight")
    mean = {name: value / count for name, value in totals.items()}
    if "compared" in totals:
        compared = max(totals["compared"], 1.0)
        mean |= {name: totals[name] / compared for name in OF_COMPARED}
    divergence = mean.get("divergence", mean.get("divergence_topk", 0.0))
    taught = mean.get("taught_ce", mean["student_ce"])
    alone = mean["student_ce"] - taught  # of positions where the text teaches alone
    figures = {"loss": loss.combine(taught, divergence) + alone}
    for side in ("student", "teacher"):
        if (ce := mean.get(f"{side}_ce")) is not None:
            figures |= {f"{side}_ce": ce, f"{side}_perplexity": compute_perplexity(ce)}
            if covered:
                figures[f"{side}_bits_per_byte"] = count_bits(ce * count, covered)
    if "agreement" in mean:
        figures |= {n: value for n, value in mean.items() if n.startswith(_COMPARED)}
        figures |= {"temperature": loss.temperature, "agreement": mean["agreement"]}
    figures |= {"bytes": float(covered)} if covered else {}
    return figures | {"tokens": count}


def split_figures(given: Sequence[Sums], loss: KDLoss) -> list[dict[str, float]]:
    """The figures of each batch with a weighted position, in order."""
    counts = [float((x.sums if isinstance(x, ExtraSums) else x).count) for x in given]
    return [merge_sums([x], loss) for x, count in zip(given, counts, strict=True) if count]


def held_out(
    eval_step: Callable[..., Sums],
    params: Params,
    teacher: Params,
    batches: Iterable[dict[str, Any]],
    loss: KDLoss,
    covered: int = 0,
) -> dict[str, float]:
    """Evaluates all batches to `held_out_figures`; reads sums after the last dispatch."""
    return merge_sums(read_sums(eval_step, params, teacher, batches), loss, covered)


def read_sums(
    eval_step: Callable[..., Sums], params: Params, teacher: Params, batches: Iterable[Any]
) -> list[Sums]:
    """The sums of each batch, on the host."""
    return jax.device_get([eval_step(params, teacher, batch) for batch in batches])


def merge_sums(given: Sequence[Sums], loss: KDLoss, covered: int = 0) -> dict[str, float]:
    """Computes `held_out_figures` from batches' sums.

    With layer losses `loss` includes them, and each is also a separate figure.
    """
    extra = [x for x in given if isinstance(x, ExtraSums)]
    sums: Any = [x.sums if isinstance(x, ExtraSums) else x for x in given]
    figures = held_out_figures(sums, loss, covered)
    if not extra:
        return figures
    count = figures["tokens"]
    figures["loss"] += math.fsum(float(x.total) for x in extra) / count
    names = extra[0].extra
    return figures | {n: math.fsum(float(x.extra[n]) for x in extra) / count for n in names}
