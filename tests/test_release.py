"""The trial of a release: rows that fail, an old folder, the repository out of reach."""

import json
import sys

import pytest

from kdjax.errors import UserError
from scripts.checks import release


def test_one_file_that_does_not_install_fails_the_release(monkeypatch, tmp_path, capsys):
    """The others are still tried; a Python that is not there is said and is no failure."""
    files = [tmp_path / "kdjax-1-py3-none-any.whl", tmp_path / "kdjax-1.tar.gz"]
    for file in files:
        file.write_bytes(b"x" * 7)

    def try_file(file, python, folder, steps):
        assert folder.is_dir() and steps == 3
        if file == files[0] and python.endswith("3.12"):
            raise UserError("pip said no")
        return dict(version="1", demo_seconds=2, text="Once")

    monkeypatch.setattr(release, "build", lambda out, scratch: files)
    monkeypatch.setattr(release, "try_file", try_file)
    monkeypatch.setattr(release, "find_python", lambda x: None if x == "3.13" else f"python{x}")
    told = tmp_path / "rows.json"
    arguments = [f"--out={tmp_path / 'new'}", "--steps=3", f"--json={told}"]
    assert release.main(arguments) == 1
    rows = json.loads(told.read_text())
    assert [row["python"] for row in rows] == ["3.11", "3.12", "3.13"] * 2
    assert [row.get("failed") for row in rows] == [None, "pip said no", *[None] * 4]
    assert [row.get("untried") for row in rows] == [None, None, "no Python 3.13"] * 2
    assert release.main([*arguments, "--only", "3.11"]) == 0
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "kdjax-0.whl").write_bytes(b"")
    assert release.main(arguments) == 2
    assert "is not empty. Give a new folder" in capsys.readouterr().err


def test_what_is_installed_does_not_see_the_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/repository")
    program = "import os; print(os.environ.get('PYTHONPATH'), os.getcwd())"
    assert release.run([sys.executable, "-c", program], tmp_path).split() == ["None", str(tmp_path)]
    with pytest.raises(UserError, match=r"-c .* ended with 3: twine's word"):
        release.run([sys.executable, "-c", 'print("twine\'s word"); raise SystemExit(3)'])
