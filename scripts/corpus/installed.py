"""Collects the Python source of installed packages, for a first run without a corpus of one's own.

    python -m scripts.corpus.installed OUT --train=jax,flax,transformers --heldout=optax,chex

Writes OUT/train and OUT/heldout. Whole packages are held out, so that no file of a held-out package
was trained on. Files that are empty, larger than 200 kB or not UTF-8 are left out.
"""

import argparse
import importlib.util
import sysconfig
from pathlib import Path

LARGEST = 200_000  # bytes; beyond it files are mostly generated tables


def source_of(package: str) -> Path:
    """The folder of an installed package; "stdlib" is the standard library."""
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package}: no installed package of that name")
    return Path(next(iter(spec.submodule_search_locations)))


def collect(package: str, out: Path) -> tuple[int, int]:
    """Copies one package's sources; returns files and bytes."""
    root, files, size = source_of(package), 0, 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.relative_to(root).parts or path.stat().st_size > LARGEST:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            target = out / package / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            files, size = files + 1, size + len(text.encode())
    return files, size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True, help="package names joined by commas")
    parser.add_argument("--heldout", default="")
    args = parser.parse_args()
    for side in ("train", "heldout"):
        for package in filter(None, getattr(args, side).split(",")):
            files, size = collect(package, args.out / side)
            print(f"{side} {package}: {files} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
