"""The embedded demo: a small teacher of Python, a smaller student, and this machine's Python code.

The models' cards, `teacher.md` and `student.md`, are next to them. The corpus is the standard
library of the running Python. Neither model was trained on the modules of `HELD_OUT`, and the demo
does not train on them either.
"""

import glob
import os
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TEACHER = FOLDER / "teacher.gguf"
TEACHER_SHAPE = FOLDER / "teacher"  # config.json of the teacher, to train it from scratch
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
# Tests, third-party packages, and tables of data.
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
    """Source files of the held-out modules in this library, in order of their names."""
    library = library or standard_library()
    modules = [library / f"{name}.py" for name in HELD_OUT]
    packages = [path for name in HELD_OUT for path in sorted((library / name).glob("*.py"))]
    return sorted(path for path in (*modules, *packages) if path.is_file())


def training_folders(library: Path | None = None) -> list[Path]:
    """Folders of the library whose Python files are text to train on.

    The top folder holds held-out modules too: the reader leaves `heldout_files` out.
    """
    found = []
    for here, folders, names in os.walk(library or standard_library()):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        if any(name.endswith(".py") for name in names):
            found.append(Path(here))
    return found


def training_text(library: Path | None = None) -> str:
    """`data.train`: the Python files of `training_folders`, as patterns joined by commas.

    Held-out modules are among them; `heldout_text` in `data.heldout` removes them from training.
    """
    return ",".join(f"{glob.escape(str(folder))}/*.py" for folder in training_folders(library))


def heldout_text(library: Path | None = None) -> str:
    """`data.heldout`: the files of the held-out modules, joined by commas."""
    return ",".join(glob.escape(str(path)) for path in heldout_files(library))
