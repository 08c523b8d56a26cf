"""Counts of a run's text: what is read, what trains, what is left out, how often it is read."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

_SIDES = "train", "heldout"


@dataclasses.dataclass(frozen=True)
class TextCounts:
    """Counts that `kdjax data`, the log and the receipt show."""

    info: Mapping[str, Any]  # of a `RowSet`; rows of earlier versions lack some entries
    files: Mapping[str, Mapping[str, int]]  # of folders, left out: by reason and suffix
    epochs: float = 0.0  # of the training rows that the run reads; 0: unknown

    @property
    def left_out(self) -> dict[str, int]:
        """Numbers of documents that are left out, by reason."""
        found = {name: count for name, count in self.info.get("left_out", {}).items() if count}
        return found

    def lines(self) -> Iterator[str]:
        """Yields a line a side, one of what is left out, if anything is, and one of epochs."""
        for side in _SIDES:
            yield f"text, {side}: {_describe_side(self.info[side])}"
        documents = [f"{count:,} documents {why}" for why, count in self.left_out.items()]
        files = [
            f"{sum(counts.values()):,} files ({_list_forms(counts)}): {why}"
            for why, counts in self.files.items()
        ]
        if documents or files:
            yield f"text, left out: {'; '.join([*documents, *files])}"
        if self.epochs:
            yield f"text: the run reads {self.epochs:.2f} epochs of its {self.rows:,} training rows"

    @property
    def rows(self) -> int:
        """The number of training rows."""
        return self.info["train"]["rows"]

    def describe(self) -> dict[str, Any]:
        """The counts as a receipt has them; JSON-able."""
        names = "documents", "records", "tokens", "targets", "rows", "long", "fill", "forms"
        sides = {side: {n: self.info[side].get(n) for n in names} for side in _SIDES}
        left_out = {"documents": self.left_out, "files": self.files}
        return sides | {"left_out": left_out, "epochs": round(self.epochs, 4)}


def _describe_side(info: Mapping[str, Any]) -> str:
    share = info["targets"] / info["tokens"]
    records = info.get("records", 0)
    forms = _list_forms(info["forms"]) if info.get("forms") else ""
    of = f" ({forms}{f'; {records:,} complete records' if records else ''})" if forms else ""
    return (
        f"{info['rows']:,} rows, {info['tokens']:,} tokens of {info['documents']:,} documents{of}, "
        f"{info['targets']:,} tokens train ({share:.1%}), {info['fill']:.1%} full"
    )


def _list_forms(counts: Mapping[str, int]) -> str:
    shown = [f"{name or 'no suffix'} {count:,}" for name, count in list(counts.items())[:5]]
    return ", ".join(shown) + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")
