"""Runs arms one after another in one process; each is a line of OUT/results.jsonl at once.

Arms that train in this process do so for their seconds (`train_for`).
"""

import gc
import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.data.pipeline import TextSource
from kdjax.data.rows import Rows
from kdjax.evaluation.heldout import read_text
from kdjax.models.tokenizer import Tokenizer

_WARMUP, _LOOK = 10, 8  # steps that the rate rises over, and between two looks at the clock


class Arm(Protocol):
    """A run that is named in its line, and the seconds that it trains for."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...


_A = TypeVar("_A", bound=Arm)


def run_arms(
    arms: Iterable[_A],
    run: Callable[[_A], dict[str, Any]],
    out: Path,
    *,
    until: float,
    around: float,
) -> None:
    """Runs the arms that have no line yet, and adds theirs; one that fails is told and passed over.

    None begins that would not end at `until`, of `time.monotonic`, if it takes `around` seconds
    beside its own.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    for arm in arms:
        if arm.name in done or time.monotonic() + arm.seconds + around > until:
            continue
        begun = time.monotonic()
        try:
            record = {"name": arm.name} | run(arm)
        except Exception as error:  # the others go on
            traceback.print_exc()
            print(json.dumps({"name": arm.name, "failed": str(error)[:200]}), flush=True)
            continue
        finally:
            gc.collect()  # arrays of the device among them
        record |= {"arm_seconds": time.monotonic() - begun, "device": str(jax.devices()[0])}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW whose rate `set_rate` sets before each step."""

    def make(learning_rate: Any) -> optax.GradientTransformation:
        adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=0.01)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    return optax.inject_hyperparams(make)(learning_rate=0.0)


def set_rate(state: Any, rate: float, number: int, share: float) -> None:
    """Sets the rate of a step by its number, from 1, and the share of the run before it.

    It rises over `_WARMUP` steps, and falls by a cosine.
    """
    now = rate * min(number / _WARMUP, 1.0) * (0.5 + 0.5 * math.cos(math.pi * min(share, 1.0)))
    state.opt_state.hyperparams["learning_rate"] = jnp.float32(now)


def train_for(
    seconds: float,
    step: Any,
    state: Any,
    teacher: Any,
    source: TextSource,
    rate: float,
    *,
    step_seconds: float = 0.0,
) -> tuple[Any, dict[str, Any]]:
    """Trains for seconds of steps, the first two not counted; returns the state, and its pace.

    `teacher` are its parameters. With `step_seconds` each step counts that many.
    """
    begun, spent, number = 0.0, 0.0, 0
    times, losses = list[float](), list[float]()
    for number in itertools.count(1):
        set_rate(state, rate, number, spent / seconds)
        state, metrics = step(state, teacher, source.next(None))
        if number == 2:  # the first compiled
            jax.block_until_ready(metrics)
            begun = time.monotonic()
        elif number > 2 and number % _LOOK == 0:
            losses.append(metrics.means()["loss"])
            clock = time.monotonic() - begun
            times.append(clock / _LOOK - sum(times))
            spent = number * step_seconds or clock
            if spent >= seconds:
                break
    return state, {
        "steps": number,
        "train_seconds": sum(times) * _LOOK,
        "step_ms": 1e3 * float(np.median(times)),
        "losses": [round(x, 4) for x in losses[:: max(1, len(losses) // 20)]],
    }


def read_beside(named: str, tokenizer: Tokenizer, *, rows: int, seq_len: int) -> dict[str, Rows]:
    """Rows of each text of NAME=PATH,..., as `kdjax evaluate --data` reads them.

    A student's cross-entropy on what it is not trained on tells what it forgets.
    """
    texts = (text.split("=", 1) for text in filter(None, named.split(",")))
    return {
        name: read_text(path, tokenizer, rows=rows, seq_len=seq_len).rows for name, path in texts
    }
