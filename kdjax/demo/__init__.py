"""The embedded demo: a small teacher of Python, a smaller student, and this machine's own text.

The models' cards, `teacher.md` and `student.md`, are beside them. Text is the standard library of
the running Python; the modules of `HELD_OUT` were kept out of the training of both, and are out of
the demo's.
"""

import glob
import os
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TEACHER = FOLDER / "teacher.gguf"
TEACHER_SHAPE = FOLDER / "teacher"  # config.json: what the teacher was before it was trained
STUDENT = FOLDER / "student.gguf"
STUDENT_SHAPE = FOLDER / "student"  # config.json and the tokenizer of both

HELD_OUT = (
    "argparse",
    "csv",
    "difflib",
    "fractions",
    "heapq",
    "ipaddress",
    "json",
    "mailbox",
    "shlex",
    "statistics",
    "textwrap",
    "turtle",
)
# Tests, packages that are not Python's own, and tables that are no prose of any kind.
_SKIPPED = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    *HELD_OUT,
)


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def heldout_files(library: Path | None = None) -> list[Path]:
    """Source files of the held-out modules that this library has, in order of their names."""
    library = library or standard_library()
    modules = [library / f"{name}.py" for name in HELD_OUT]
    packages = [path for name in HELD_OUT for path in sorted((library / name).glob("*.py"))]
    return sorted(path for path in (*modules, *packages) if path.is_file())


def training_folders(library: Path | None = None) -> list[Path]:
    """Folders of the library whose Python files are text to train on.

    The top one holds held-out modules too: who reads it leaves `heldout_files` out.
    """
    found = []
    for here, folders, names in os.walk(library or standard_library()):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        if any(name.endswith(".py") for name in names):
            found.append(Path(here))
    return found


def training_text(library: Path | None = None) -> str:
    """`data.train`: the Python files of `training_folders`, as patterns joined by commas.

    Held-out modules are among them and leave by `heldout_text`: what is in `data.heldout` is not
    trained on.
    """
    return ",".join(f"{glob.escape(str(folder))}/*.py" for folder in training_folders(library))


def heldout_text(library: Path | None = None) -> str:
    """`data.heldout`: the files of the held-out modules, joined by commas."""
    return ",".join(glob.escape(str(path)) for path in heldout_files(library))
