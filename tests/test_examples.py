"""Every program of examples/ on the demo's models, with few steps; each is short and listed."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from exporting import needs_llama_cpp

import kdjax

pytestmark = pytest.mark.usefixtures("one_device", "optimized")

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = {  # by name: the files that it leaves
    "draft_for_server": ("draft.gguf",),
    "distil_pair": ("receipt.json", "student-q8_0.gguf"),
    "lora_on_packed": ("adapter/adapter_config.json", "adapter.gguf"),
    "own_divergence": (),
    "own_loop": ("student-hf/config.json",),
    "smaller_file": ("teacher-q2_k.gguf",),
}


def test_each_program_is_short_tested_and_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROGRAMS)
    page = (EXAMPLES / "README.md").read_text()
    for name in PROGRAMS:
        assert f"({name}.py)" in page
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_and_leaves_its_files(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    steps = 16 if name == "own_divergence" else 8  # it has a fast rate and rises first
    main(**({"out": "out"} if PROGRAMS[name] else {}), steps=steps)
    for file in PROGRAMS[name]:
        assert (tmp_path / "out" / file).is_file()
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.split(": ") for line in lines if line.count(": ") == 1)
    if name.startswith("own") or name == "lora_on_packed":
        assert 0 < float(shown["after"]) < float(shown["before"])
    if name == "draft_for_server":
        assert 0 < float(shown["before"]) < float(shown["after"]) < 1
        told = re.fullmatch(r"(\d+) drafts accepted in (\d+) passes: .*", lines[-1])
        assert 0 < int(told[1]) <= 3 * int(told[2]) and "llama-server" not in lines[-1]
    if name == "smaller_file":
        assert 0 < float(shown["trained"]) < float(shown["rounded"])
        small = kdjax.load(tmp_path / "out" / PROGRAMS[name][0], weights="packed")
        assert small.generate("Once", max_tokens=1)[0].ids


@pytest.mark.slow
@needs_llama_cpp
def test_the_notebook_runs_to_the_text_of_llama_cpp(tmp_path):
    """Each evaluation is better than the one before; llama.cpp writes what kdjax does.

    A third of its steps: 24 s of a core less.
    """
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "demo.ipynb", 4)
    (steps,) = [cell for cell in notebook.cells if "steps = 240" in cell.source]
    steps.source = steps.source.replace("steps = 240", "steps = 80")
    nbformat.write(notebook, tmp_path / "asked.ipynb")
    program = "import nbclient, nbformat; notebook = nbformat.read('asked.ipynb', 4); "
    program += "nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3').execute(); "
    program += "nbformat.write(notebook, 'made.ipynb')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    notebook = nbformat.read(tmp_path / "made.ipynb", 4)
    text = (tmp_path / "runs/notebook/metrics.jsonl").read_text()
    lines = [*map(json.loads, text.splitlines())]
    kls = [line["kl"] for line in lines if line["kind"] == "eval"]
    assert len(kls) > 3 and kls == sorted(kls, reverse=True) and kls[-1] < 0.8 * kls[0]
    said = "".join(output["text"] for output in notebook.cells[-1].outputs if "text" in output)
    theirs, ours = said[said.index("llama.cpp:") :].split("kdjax:")
    theirs, ours = theirs.removeprefix("llama.cpp:").strip(), ours.strip()
    assert len(ours) > 60 and theirs[:40] == ours[:40]
    assert "image/png" in str(notebook.cells) and "rgba(0,150,80" in str(notebook.cells)
