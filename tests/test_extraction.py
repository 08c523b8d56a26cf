"""The part of a chat answer that is judged: the block, and what its function needs."""

import dataclasses
import textwrap

import pytest
from test_evaluate import humaneval, said

from kdjax.evaluation import passk, problems

F = "```"
RIGHT = "def add1(a):\n    return a + 1"
BLOCK = f"Sure:\n{F}python\n{RIGHT}\n{F}\n"
WRONG = (
    "def add1(a):\n    result = a\n    for x in range(9):\n        result -= x\n    return result"
)


@pytest.mark.parametrize(
    "answer",
    [
        f"{BLOCK}Use it so:\n{F}python\nfrom answer import add1\nprint(add1(1), add1(2))\n{F}\n",
        f"{BLOCK}It prints:\n{F}\n{'3 3 3' * 20}\n{F}\n",
        f"{BLOCK}{F}python\n>>> add1(2)\n3\n>>> add1(7)\n8\n>>> add1(8)\n9\n{F}\n",
        f"{F}python\n{WRONG}\n{F}\nNo, this is better:\n{BLOCK}",
        f"<think>\n{F}python\n{WRONG}\n{F}\nNo.\n</think>\n{BLOCK}",
        f"{WRONG}\n</think>\n{RIGHT}",  # of a template that opens the thought
        f"{F}python3\n{RIGHT}\n{F}\nDone.",
        f'{F}python title="a.py"\n{RIGHT}\n{F}\nDone.',
        f"~~~~py\n{RIGHT}\n~~~~\nDone.",
        f"Here it is: {F}python\n{RIGHT}\n{F}",
        "1. It is:\n\n"
        + textwrap.indent(f"{F}python\n{RIGHT}\n{F}", "   ")
        + "\n\n2. That is all.",
        f"1. {F}python\n" + textwrap.indent(f"{RIGHT}\n{F}", "   "),
        BLOCK.replace("\n", "\r\n"),
        f"{F}python\n{RIGHT}",  # cut off after the function
        f'{F}python\n{RIGHT}\n\nUSE = """\n{F}\nadd1(1)\n{F}\n"""\n{F}\n',
        f"The helper:\n{F}python\ndef one():\n    return 1\n{F}\nThe function:\n{F}python\n"
        f"def add1(a):\n    return a + one()\n{F}\n",
        RIGHT,
    ],
)
def test_the_block_that_defines_the_function_is_judged(tmp_path, answer):
    """The longest block was, and a fence was one by two names at the start of a line."""
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    sample = passk.judge(
        (problem, said(answer)), passk.Settings(wording="request", allow_unsandboxed=True)
    )
    assert sample.reason == "passed", sample


@pytest.mark.parametrize(
    "answer",
    [
        f"{BLOCK}Or, without a return:\n{F}python\n{WRONG}\n{F}\n",  # its last word
        f"<think>\n{BLOCK}",  # a thought that did not end
        f"Sure:\n{F}\n{WRONG}\n{F}\n",
    ],
)
def test_what_is_no_answer_does_not_pass(tmp_path, answer):
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    sample = passk.judge(
        (problem, said(answer)), passk.Settings(wording="request", allow_unsandboxed=True)
    )
    assert sample.reason != "passed", sample


def test_backticks_in_a_string_end_no_opened_block(tmp_path):
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    for inside in (f'    fence = "{F}"', f'    """\n    {F}\n    add1(1)\n    {F}\n    """'):
        answer = (
            f"def add1(a):\n{inside}\n    return a + 1\n{F}\n\nUse it:\n{F}python\nadd1(2)\n{F}"
        )
        sample = passk.judge(
            (problem, said(answer)), passk.Settings(wording="instruct", allow_unsandboxed=True)
        )
        assert sample.reason == "passed", sample


@pytest.mark.parametrize("wording", ["request", "instruct"])
@pytest.mark.parametrize(
    "code",
    [
        f"from __future__ import annotations\n\n{RIGHT}",
        "import sys\nif sys.version_info >= (3, 0):\n    from operator import add\n"
        "def add1(a):\n    return add(a, 1)",
        "ONE = 0\nONE += 1\ndef add1(a):\n    return a + ONE",
        "ONES = []\nfor _ in range(3):\n    ONES.append(1)\ndef add1(a):\n    return a + ONES[2]",
        "ONES = []\ndef fill():\n    ONES.append(1)\nfill()\ndef add1(a):\n    return a + ONES[0]",
        "import random\nrandom.seed(7)\ndrawn = random.random()\n"
        "def add1(a):\n    random.seed(7)\n    return a + 1 if random.random() == drawn else a",
        "import sys\nsys.setrecursionlimit(5000)\ndef down(n):\n"
        "    return down(n - 1) if n else 1\n"
        "def add1(a):\n    return a + down(2000)",
        "def add1(a):\n    return a + add1.one\nadd1.one = 1",
        "import functools\ndef add1(a):\n    return a + 1\nadd1 = functools.cache(add1)",
        "class Adder:\n    def __call__(self, a):\n        return a + 1\nadd1 = Adder()",
        "try:\n    from operator import add\nexcept ImportError:\n    add = None\n"
        "def add1(a):\n    return add(a, 1)",
        # What the function does not need: input, tests and examples of its use.
        f"import sys, unittest\n{RIGHT}\na = int(input())\nprint(add1(a)); assert add1(1) == 5\n"
        "result = add1(int(sys.stdin.readline()))\nfor x in [1]:\n    assert add1(x) == 0\n"
        "class Test(unittest.TestCase):\n    def test(self): add1('')\n"
        "def main():\n    print(add1(None))\nmain()\nunittest.main()\nsys.exit(1)",
    ],
)
def test_what_a_function_needs_at_the_top_level_runs(tmp_path, wording, code):
    """Only imports, definitions and assignments did, after the prompt's imports."""
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    answer = f"{code}\n{F}\n" if wording == "instruct" else f"{F}python\n{code}\n{F}"
    problem = dataclasses.replace(problem, header="from typing import List\n")
    sample = passk.judge(
        (problem, said(answer)), passk.Settings(wording=wording, allow_unsandboxed=True)
    )
    assert sample.reason == "passed", sample
