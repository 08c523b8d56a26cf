"""Griffe extension: the comment at the end of a field's line is its text in the reference."""

import re
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Takes `count: int = 0  # rows so far` as a field with the docstring "Rows so far."."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Adds a docstring to a field of a class that has a comment and no docstring."""
        found = re.search(r"  # (?!type:|pyright:|noqa)(.+)$", "".join(attr.lines[-1:]))
        if found and attr.docstring is None and attr.parent and attr.parent.is_class:
            text = found[1][0].upper() + found[1][1:]
            attr.docstring = griffe.Docstring(f"{text.rstrip('.')}.", parent=attr)
