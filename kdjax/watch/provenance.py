"""Parts of a receipt: the file, canonical hashes, and the revision of the source."""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.formats.saved import read_receipt

FORMAT = 1  # raise when a field changes its meaning
REVISION_FILE = ".revision"  # next to kdjax/, if the source came without its .git
_SOURCE = Path(__file__).resolve().parents[2]


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of a nested config as JSON with sorted keys and no spaces."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def add_tensor(digest: Any, name: str, tensor: np.ndarray) -> None:
    """Feeds one tensor into a hash of parameters: name, shape, dtype and bytes, row-major."""
    digest.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype.name}\0".encode())
    digest.update(np.ravel(tensor).view(np.uint8).data)


def params_hash(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """SHA-256, in hex, over the tensors in the given order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        add_tensor(digest, name, tensor)
    return digest.hexdigest()


def source_revision(root: Path = _SOURCE) -> tuple[str | None, bool | None]:
    """The source's git commit and whether `kdjax/` differs from it; None for unknown values.

    A source without `.git` may carry its commit in a file `.revision`, as
    scripts/dispatch/dispatch.sh writes it.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        # kdjax may be installed in an environment inside somebody else's repository.
        if Path(git("rev-parse", "--show-toplevel")).resolve() == root:
            return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "kdjax"))
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return (root / REVISION_FILE).read_text().split()[0], None
    except (OSError, IndexError):
        return None, None


def read(workdir: Path) -> dict[str, Any] | None:
    """Reads the receipt in `workdir`; None without a file. Raises `ValueError` for another file."""
    receipt = read_receipt(workdir)
    if receipt is not None and receipt.get("format") != FORMAT:
        raise ValueError(f"no receipt of format {FORMAT}")
    return receipt
