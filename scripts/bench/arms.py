"""Runs arms one after another in one process; each is a line of OUT/results.jsonl at once."""

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from kdjax.data.rows import Rows
from kdjax.evaluation.heldout import read_text
from kdjax.models.tokenizer import Tokenizer


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


def read_beside(named: str, tokenizer: Tokenizer, *, rows: int, seq_len: int) -> dict[str, Rows]:
    """Rows of each text of NAME=PATH,..., as `kdjax evaluate --data` reads them.

    A student's cross-entropy on what it is not trained on tells what it forgets.
    """
    texts = (text.split("=", 1) for text in filter(None, named.split(",")))
    return {
        name: read_text(path, tokenizer, rows=rows, seq_len=seq_len).rows for name, path in texts
    }
