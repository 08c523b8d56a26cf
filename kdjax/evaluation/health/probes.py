"""Texts and questions that a language model can continue: of code, or of simple English."""

from kdjax.models.checkpoint import Checkpoint

TOKENS = 512

# About 500 tokens of Qwen2.5: enough for rotations to matter, little enough for a CPU.
TEXT = '''\
"""Small helpers for reading a table of measurements.

The file has one measurement a line: a name, a colon, and a number. Lines that start with a hash
sign are comments. Empty lines are skipped. The first thing that cannot be read is reported with
the number of its line, so that it can be found and mended.
"""

import math
from collections import defaultdict


class Measurement:
    """One number and the name it was given."""

    def __init__(self, name, value):
        self.name = name
        self.value = value

    def __repr__(self):
        return f"Measurement({self.name!r}, {self.value!r})"


def read_measurements(path):
    """Returns a list of measurements, in the order of the file."""
    measurements = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(f"line {number}: expected a colon")
            measurements.append(Measurement(name.strip(), float(value)))
    return measurements


def group_by_name(measurements):
    """Returns a dictionary from each name to the list of its values."""
    groups = defaultdict(list)
    for measurement in measurements:
        groups[measurement.name].append(measurement.value)
    return dict(groups)


def mean(values):
    """Returns the mean of the values. The list must not be empty."""
    return sum(values) / len(values)


def standard_deviation(values):
    """Returns the standard deviation of the values."""
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / len(values))


def main(path):
    groups = group_by_name(read_measurements(path))
    for name, values in sorted(groups.items()):
        print(f"{name}: mean {mean(values):.3f}, deviation {standard_deviation(values):.3f}")
'''

# A paragraph, as those that small models are taught; more would be longer than what they read.
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the garden with "
    "her dog, Max. One day, Max ran away and Lily was very sad. She looked under the bed and in "
    'the box, but she could not find him. Her mom said, "Do not worry, Lily. We will find '
    'him together." They walked to the park and saw a big dog. The dog was playing with Max. Lily '
    "was so happy to see her friend again. They had a big hug and they all went home. From "
    "that day on, Lily and Max were best friends."
)

TEXTS = {"plain English and Python": TEXT, "a simple story": STORY}

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that returns the sum of a list of numbers.",
    "Explain in two sentences what a hash table is.",
    "Write a Python function that reverses a string, and show how to call it.",
)
BEGINNINGS = (
    "The capital of France is",
    'def add(a, b):\n    """Return the sum of a and b."""\n',
    "A hash table is a data structure that",
    'def reverse(text):\n    """Return the text backwards."""\n',
)
ANSWER_TOKENS = 64


def probe_ids(checkpoint: Checkpoint, text: str = TEXT) -> list[int]:
    """A probe text in the model's tokens, cut to its context."""
    spec = checkpoint.spec
    ids = [i for i in checkpoint.tokenizer.encode(text) if i < spec.vocab_size]
    return ids[: min(TOKENS, spec.max_positions)]
