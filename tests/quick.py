"""Which of many cases a user's quick check keeps; CI runs all of them."""

import pytest


def cases(*quick, slow=()):
    """Parameters for `parametrize`: the first of them quick, those of `slow` marked so."""
    return [*quick, *(_slow(case) for case in slow)]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
