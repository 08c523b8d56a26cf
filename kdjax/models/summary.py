"""One line of a tree of arrays, and a short table for a notebook: `repr` of models and states."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from kdjax.device.sharding import count_bytes


def describe_arrays(tree: Any) -> str:
    """Counts the arrays of a tree, or their shapes: `14 arrays, float32, 1.98 GB`."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "no arrays"
    types = sorted({str(x.dtype) for x in leaves})
    return f"{len(leaves)} arrays, {'/'.join(types)}, {count_bytes(tree) / 1e9:.3g} GB"


def describe_step(step: Any) -> str:
    """A step's number as text; `unknown` in a traced program, or once another step took it."""
    try:
        return str(int(step))
    except (TypeError, RuntimeError):  # no value: a tracer or a shape; a donated array
        return "unknown"


def make_table(title: str, rows: Mapping[str, str]) -> str:
    """An HTML table of two columns below its title."""
    lines: Iterable[str] = (
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{''.join(lines)}</table>"
