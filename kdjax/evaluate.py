"""Held-out evaluation: student against teacher and against the text."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from kdjax.losses import EvalSums
from kdjax.metrics import held_out_figures
from kdjax.models.decoder import Params


def held_out(
    eval_step: Callable[..., EvalSums],
    params: Params,
    teacher: Params,
    batches: Iterable[dict[str, Any]],
    temperature: float,
) -> dict[str, float]:
    """Figures over all batches, in nats a token: cross-entropies, KL at T and at 1, agreement.

    Sums stay on the device until the last batch was dispatched.
    """
    sums = [eval_step(params, teacher, batch) for batch in batches]
    return held_out_figures(jax.device_get(sums), temperature)
