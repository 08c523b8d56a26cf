"""HumanEval written by llama.cpp and by kdjax: the same prompts, and the same greedy answers."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import pytest
from test_evaluate import humaneval

import kdjax
from kdjax import demo
from kdjax.evaluation import passk, problems
from kdjax.models.decoding import Sampling
from scripts.checks import llama_answers
from scripts.checks.llama_answers import count_equal


@pytest.mark.slow
def test_llama_cpp_writes_the_answers_that_kdjax_writes(tmp_path):
    pytest.importorskip("xllamacpp")
    model, file = kdjax.load(demo.STUDENT, dtype="float32"), tmp_path / "f32.gguf"
    # llama.cpp rounds what it multiplies blocks with, and texts part where two ids are close.
    kdjax.export_gguf(model, file, dtype="f32")
    asked, tokenizer = problems.load_humaneval(humaneval(tmp_path)), model.tokenizer

    def generate(prompts, stops):
        sampling = Sampling(12, 0.0, stop_ids=tokenizer.stop_ids, stop_strings=stops)
        return model.generate(prompts, sampling)

    settings = passk.Settings(wording="bare", batch_size=4, allow_unsandboxed=True)
    ours = passk.run_benchmark(asked, tokenizer, generate, settings)
    against, out = tmp_path / "ours.json", tmp_path / "theirs.json"
    against.write_text(json.dumps({"humaneval": ours}))
    flags = ["--wording=bare", "--max-tokens=12", "--positions=256", "--slots=2", "--threads=1"]
    flags += ["--allow-unsandboxed", f"--against={against}", f"--json={out}"]
    command = [sys.executable, "-m", "scripts.checks.llama_answers", str(file)]
    command += [f"--humaneval={tmp_path / 'h.jsonl'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(out.read_text())["humaneval"]
    assert all(result["answer"] for result in theirs["results"])
    assert theirs["equal"] == {"problems": 3, "answers": 3, "verdicts": 3}
    assert "3 problems, 3 answers, 3 verdicts" in done.stdout
    with serve(file) as url:  # the same by a server that runs already
        status = llama_answers.main([*command[3:], f"--server={url}"])
    assert status == 0
    assert json.loads(out.read_text())["humaneval"]["results"] == theirs["results"]
    assert llama_answers.main([*command[3:], f"--server={url}"]) == 2  # it has ended


_SERVE = """
import sys, xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 512, 2, False
server = xllamacpp.Server(params)
print("ADDRESS", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def serve(file):
    """The address of a llama.cpp server of the file."""
    command = [sys.executable, "-c", _SERVE, str(file)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, text=True, **pipes) as server:
        try:
            yield next(line.split()[-1] for line in server.stdout if "ADDRESS" in line)
        finally:
            server.kill()


def test_what_two_writers_share_is_counted_by_problem():
    def found(*ends):
        samples = [passk.Sample(f"T/{i}", reason, "", "", text) for i, text, reason in ends]
        return {"results": [dataclasses.asdict(sample) for sample in samples]}

    ours = found((0, "a", "passed"), (1, "b", "passed"), (2, "c", "timeout"))
    theirs = found((2, "d", "timeout"), (1, "b", "passed"), (3, "e", "passed"))
    assert count_equal(ours, theirs) == {"problems": 2, "answers": 1, "verdicts": 2}
