"""The demo's corpus: stories in simple English that a published model writes, cleaned and split.

    python -m scripts.demo.stories prompts prompts.jsonl --count=60000
    python -m scripts.demo.stories clean answers.jsonl OUT

scripts/demo/make_stories.sh runs both, and the model between them. A prompt asks for a story with a
noun, a verb, an adjective, a name and a turn of the plot, drawn from the lists below, as those of
TinyStories do (Eldan and Li 2023, arXiv 2305.07759). `clean` keeps each story once, if it ends and
each of its words is in at least `--shared` stories. OUT gets heldout.jsonl, stories.jsonl for the
demo, rest.jsonl (`{"text": ...}` a line), tokenizer.json (byte-level BPE of `IDS` ids) and
corpus.json, which counts it all. The student has read a part of rest.jsonl, the teacher both.
"""

import argparse
import collections
import hashlib
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

WORDS = Path(__file__).with_name("words.json")
IDS = 2000  # of the tokenizer, the end of a text among them
END = "<|endoftext|>"
SHORTEST, LONGEST = 300, 1200  # characters of a story
HELD_OUT, DEMO = 400, 4500  # stories of heldout.jsonl and of stories.jsonl

TURNS = (
    "The story has a happy ending.",
    "In the story somebody says something kind.",
    "In the story something goes wrong, and then it gets better.",
    "In the story two friends talk to each other.",
    "At the end somebody learns to share.",
    "At the end somebody says sorry.",
    "There is a small surprise at the end.",
    "In the story somebody is afraid at first.",
    "In the story somebody needs help and gets it.",
    "In the story somebody tries three times.",
)


def write_prompts(out: Path, count: int, seed: int = 0) -> None:
    """Writes `count` requests for a story, `{"messages": [...]}` a line, each another draw."""
    draw = random.Random(seed)
    listed = json.loads(WORDS.read_text("utf-8"))
    lists = {kind: text.split() for kind, text in listed.items()}
    with out.open("w", encoding="utf-8") as file:
        for _ in range(count):
            name, noun, verb, adjective = (draw.choice(found) for found in lists.values())
            asked = (
                "Write a very short story for a three-year-old child, in 100 words, with short "
                f"sentences and very simple words. It is about {name}. It uses the words "
                f'"{noun}", "{verb}" and "{adjective}". {draw.choice(TURNS)} '
                'Begin with "One day" or "Once upon a time". Write only the story.'
            )
            file.write(json.dumps({"messages": [{"role": "user", "content": asked}]}) + "\n")


def tidy(story: str) -> str:
    """One story in plain ASCII, paragraphs a line each; "" if it is none that can be kept."""
    for typed, plain in (
        ("’", "'"),
        ("‘", "'"),
        ("“", '"'),
        ("”", '"'),
        ("—", " - "),
        ("…", "..."),
    ):
        story = story.replace(typed, plain)
    lines = [" ".join(line.split()) for line in story.splitlines()]
    story = "\n".join(line for line in lines if line)
    if not re.match(r"(One|Once|In|There|It) ", story) or not story.isascii():
        return ""
    if re.search(r"[*#_<>{}\[\]|\\`/=0-9]", story) or not re.search(r"[.!?]\"?$", story):
        return ""
    return story if SHORTEST <= len(story) <= LONGEST else ""


def words(story: str) -> set[str]:
    """Its words in small letters."""
    return set(re.findall(r"[a-z']+", story.lower()))


def read_answers(paths: Iterable[Path]) -> Iterable[str]:
    """The answers in files of `kdjax answers`, or stories that were cleaned before."""
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            record = json.loads(line)
            yield record["messages"][-1]["content"] if "messages" in record else record["text"]


def train_tokenizer(stories: Iterable[str]) -> str:
    """tokenizer.json of a byte-level BPE, text cut as Qwen2 cuts it."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, levels])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=IDS - 1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str()


def clean(answers: list[Path], out: Path, shared: int, seed: int = 0) -> dict[str, Any]:
    """Writes the corpus; returns what corpus.json says."""
    told = list(read_answers(answers))
    tidied = list(dict.fromkeys(story for story in map(tidy, told) if story))
    counts = collections.Counter(word for story in tidied for word in words(story))
    kept = [story for story in tidied if all(counts[word] >= shared for word in words(story))]
    random.Random(seed).shuffle(kept)
    parts = {
        "heldout": kept[:HELD_OUT],
        "stories": kept[HELD_OUT : HELD_OUT + DEMO],
        "rest": kept[HELD_OUT + DEMO :],
    }
    out.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "answers": len(told),
        "kept": len(kept),
        "words": len({word for story in kept for word in words(story)}),
    }
    for name, stories in parts.items():
        data = "".join(json.dumps({"text": story}) + "\n" for story in stories).encode()
        (out / f"{name}.jsonl").write_bytes(data)
        size = sum(map(len, stories))
        said[name] = {"stories": len(stories), "bytes": size, "sha256": _sha256(data)}
    (out / "tokenizer.json").write_text(train_tokenizer(kept[HELD_OUT:]), "utf-8")
    (out / "corpus.json").write_text(json.dumps(said, indent=1) + "\n")
    return said


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prompts")
    one.add_argument("out", type=Path)
    one.add_argument("--count", type=int, default=60_000)
    two = commands.add_parser("clean")
    two.add_argument("answers", type=Path, nargs="+")
    two.add_argument("out", type=Path)
    two.add_argument("--shared", type=int, default=25, help="stories that a word must be in")
    args = parser.parse_args()
    if args.command == "prompts":
        write_prompts(args.out, args.count)
    else:
        print(clean(args.answers, args.out, args.shared))


if __name__ == "__main__":
    main()
