"""Last results of tests, as `tests/conftest.py` records them, and the report made of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.contracts.claims import Claim

FILE = Path(".pytest_cache") / "kdjax_results.json"
_WORST_FIRST = ("failed", "skipped", "passed")


class Last(NamedTuple):
    """How a test ended, and when: local time to the second."""

    outcome: str  # passed | failed | skipped
    when: str


def matches(node: str, wanted: str) -> bool:
    """Whether a collected test is the one named, or one of its cases."""
    return node == wanted or node.startswith(f"{wanted}[")


class Results(NamedTuple):
    """Results by node id."""

    by_node: dict[str, Last]

    def of(self, wanted: str) -> Last | None:
        """The worst result among a test's cases, and the oldest time; None if it never ran."""
        found = [last for node, last in self.by_node.items() if matches(node, wanted)]
        if not found:
            return None
        outcome = min((last.outcome for last in found), key=_WORST_FIRST.index)
        return Last(outcome, min(last.when for last in found))


def read_results(root: Path) -> Results:
    """What was recorded under `root`; nothing if no test has run there."""
    try:
        stored = json.loads((root / FILE).read_text())
        by_node = {node: Last(*last) for node, last in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        by_node = {}
    known = {node: last for node, last in by_node.items() if last.outcome in _WORST_FIRST}
    return Results(known)


def report(claims: list[Claim], results: Results) -> Iterator[str]:
    """One paragraph a claim: id, what it says, its test, how that ended last and when."""
    path = None
    for claim in claims:
        if claim.path != path:
            path = claim.path
            yield f"{path}"
        last = results.of(claim.node)
        ended = f"{last.outcome} {last.when}" if last else "never run"
        yield f"  {claim.id}{' (proof)' if claim.proof else ''}: {' '.join(claim.says.split())}"
        yield f"    {claim.node or '(no test)'}: {ended}"
    ends = [last.outcome if (last := results.of(c.node)) else "never run" for c in claims]
    kinds = (*reversed(_WORST_FIRST), "never run")
    yield f"{len(claims)} claims: " + ", ".join(f"{ends.count(k)} {k}" for k in kinds)
