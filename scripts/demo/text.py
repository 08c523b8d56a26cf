"""The training text of the demo's models: this Python's standard library and a corpus.

    python -m scripts.demo.text /tmp/demo/text --corpus=corpus/train.jsonl
    python -m scripts.demo.text /tmp/demo/text --corpus=corpus/train.jsonl --without-library

Writes train.jsonl ({"text": ..., "source": ...} a line), heldout/ (copies of the held-out modules)
and text.json, which says what went in and what was left out. The corpus is a .jsonl of the same
form, or a .tar, compressed or not, that holds a train.jsonl. A document is left out if it is named
as a held-out module or shares `MOST` or more long lines with them all, which is how backports and
vendored copies show. `--without-library` is for the student, who shall meet the library in the demo
only: of it nothing is taken, nor a document that has `SHARE` or more of its long lines from it.
"""

import argparse
import contextlib
import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdjax import demo

LONG, MOST = 30, 4  # characters that make a line tell; distinct such lines that make a copy
SHARE = 0.1  # of a document's long lines
LARGEST = 200_000  # bytes; beyond it files are mostly tables


def telling_lines(text: str) -> set[str]:
    """The lines of `LONG` characters or more, blanks run together."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return {line for line in lines if len(line) >= LONG}


def is_named_as_held_out(source: str) -> bool:
    """Whether a file's path ends as a held-out module's would."""
    path = Path(source)
    return path.stem in demo.HELD_OUT or path.parent.name in demo.HELD_OUT


def library() -> Iterator[tuple[str, str]]:
    """Source and text of the standard library's files, held-out ones too."""
    root = demo.standard_library()
    for folder in demo.training_folders():
        for path in sorted(folder.glob("*.py")):
            if path.stat().st_size <= LARGEST:
                name = path.relative_to(root).as_posix()
                yield f"cpython-{platform.python_version()}/{name}", path.read_text("utf-8")


def corpus(path: Path) -> Iterator[tuple[str, str]]:
    """Source and text of a corpus's documents."""
    with contextlib.ExitStack() as stack:
        if ".tar" in path.name:
            archive = stack.enter_context(tarfile.open(path))
            member = next(m for m in archive if Path(m.name).name == "train.jsonl")
            opened = archive.extractfile(member)
            assert opened is not None
            file: Any = io.TextIOWrapper(opened, "utf-8")
        else:
            file = stack.enter_context(path.open(encoding="utf-8"))
        for line in file:
            record = json.loads(line)
            yield record.get("source", ""), record["text"]


def write(out: Path, corpora: list[Path], with_library: bool = True) -> dict[str, Any]:
    """Writes the files; returns what `text.json` says."""
    held_files = demo.heldout_files()
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    for path in held_files:
        name = path.relative_to(demo.standard_library()).as_posix().replace("/", "_")
        shutil.copyfile(path, out / "heldout" / name)
    held = set().union(*(telling_lines(path.read_text("utf-8")) for path in held_files))
    sources = {path.name: corpus(path) for path in corpora}
    unwanted: set[str] = set()
    if with_library:
        sources = {"cpython": library(), **sources}
    else:
        unwanted.update(*(telling_lines(text) for _, text in library()))
    counts = {name: {"documents": 0, "bytes": 0} for name in sources}
    dropped: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    with (out / "train.jsonl").open("w", encoding="utf-8") as file:
        for name, found in sources.items():
            for source, text in found:
                lines = telling_lines(text)
                shared, copied = len(lines & held), len(lines & unwanted)
                is_copy = copied >= MOST and copied >= SHARE * len(lines)
                if is_named_as_held_out(source) or shared >= MOST or is_copy:
                    dropped.append({"source": source, "lines_shared": max(shared, copied)})
                    continue
                line = json.dumps({"text": text, "source": source}) + "\n"
                digest.update(line.encode())
                file.write(line)
                counts[name]["documents"] += 1
                counts[name]["bytes"] += len(text.encode())
    held_digest = hashlib.sha256(b"".join(path.read_bytes() for path in held_files)).hexdigest()
    return {
        "python": platform.python_version(),
        "held_out_modules": list(demo.HELD_OUT),
        "held_out_files": [path.name for path in held_files],
        "held_out_bytes": sum(path.stat().st_size for path in held_files),
        "held_out_sha256": held_digest,
        "counts": counts,
        "train_sha256": digest.hexdigest(),
        "dropped": dropped,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, action="append", default=[])
    parser.add_argument("--without-library", action="store_true", help="for the student")
    args = parser.parse_args()
    said = write(args.out, args.corpus, not args.without_library)
    (args.out / "text.json").write_text(json.dumps(said, indent=1) + "\n")
    print(f"{said['counts']}; {len(said['dropped'])} documents left out")


if __name__ == "__main__":
    main()
