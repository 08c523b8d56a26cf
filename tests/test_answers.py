"""A server's answers in each form, as rows, as a cache, and in training."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import optax
import pytest
from scipy.special import expit, log_softmax, logsumexp

import kdjax
from kdjax import config as config_module
from kdjax.commands.cache import main as cache_command
from kdjax.commands.verify import main as verify_command
from kdjax.data.answers import read_answers
from kdjax.data.teacher_cache import split_caches
from kdjax.errors import BAD_INPUT, FINISHED, UserError
from kdjax.evaluation import heldout
from kdjax.training.caching import cache_answers
from kdjax.training.identity import identify
from kdjax.training.inputs import hash_contents
from kdjax.training.job import assemble
from kdjax.training.kinds import ask_kinds

pytestmark = pytest.mark.usefixtures("one_device")

PROMPT, WORDS = "def f(x):\n", ["return", " ", "x", "<|endoftext|>"]
CHAT = [{"role": "user", "content": "hi"}]
K = 4


@functools.cache
def tokenizer(folder):
    return kdjax.open_checkpoint(folder / "student.gguf").tokenizer


def said(words, seed=0, k=K):
    """(id, log-probability) of k alternatives to each token; the token is among them."""
    rng = np.random.default_rng(seed)
    return [
        [
            (i, float(x))
            for i, x in zip([word, *others], log_softmax(rng.normal(size=40))[:k], strict=True)
        ]
        for word, others in (
            (w, rng.choice([i for i in range(250) if i != w], k - 1, replace=False).tolist())
            for w in words
        )
    ]


def entry(tok, pairs, *, ids, raw):
    """A token as llama.cpp writes it: with its id, or with its bytes alone."""

    def one(i, log_prob):
        spelled = next(text for text, at in tok.ids_by_bytes.items() if at == i)
        text = spelled.decode(errors="replace")
        return (
            {"token": text, "logprob": log_prob}
            | ({"id": i} if ids else {})
            | ({"bytes": list(spelled)} if raw else {})
        )

    return one(*pairs[0]) | {"top_logprobs": [one(*pair) for pair in pairs]}


def lines(tok):
    """The same answer in every form that is read; K alternatives a token."""
    words = [tok.ids_by_bytes[word.encode()] for word in WORDS]
    top = said(words)
    prompt = tok.encode(PROMPT)
    own = {
        "tokens": [*prompt, *words],
        "start": len(prompt),
        "teacher_ids": [[i for i, _ in pairs] for pairs in top],
        "teacher_top_log_probs": [[x for _, x in pairs] for pairs in top],
    }
    content = [entry(tok, pairs, ids=True, raw=True) for pairs in top]
    spelled = [entry(tok, pairs, ids=False, raw=True) for pairs in top]
    usage = {"usage": {"prompt_tokens": len(prompt)}}
    named = {
        "tokens": [f"token_id:{i}" for i in words],
        "token_logprobs": [pairs[0][1] for pairs in top],
        "top_logprobs": [{f"token_id:{i}": x for i, x in pairs} for pairs in top],
    }
    chat = len(tok.encode(tok.render(CHAT, answer_next=True)))
    return {
        "own": own,
        "llama.cpp": {"prompt": PROMPT, "response": {"completion_probabilities": content,
                      "tokens_evaluated": len(prompt)}},
        "OpenAI": {"prompt": PROMPT, "choices": [{"logprobs": {"content": spelled}}]},
        "vLLM": {"prompt": PROMPT, "response": {"choices": [{"logprobs": named}]} | usage},
        "ids": {"response": {"choices": [{"logprobs": named}], "prompt_token_ids": prompt}},
        "chat": {"messages": CHAT, "response": {"choices": [{"logprobs": {"content": content}}] * 2,
                 "usage": {"prompt_tokens": chat}}},
    }  # fmt: skip


def test_every_form_says_the_same(models):
    tok = tokenizer(models)
    forms = {name: list(read_answers(line, name, tok)) for name, line in lines(tok).items()}
    words = [tok.ids_by_bytes[word.encode()] for word in WORDS]
    prompts = {"chat": tok.encode(tok.render(CHAT, answer_next=True))}
    for name, answers in forms.items():
        assert len(answers) == (2 if name == "chat" else 1)
        for answer in answers:
            prompt = prompts.get(name, tok.encode(PROMPT))
            assert answer.ids.tolist() == [*prompt, *words] and answer.start == len(prompt)
            assert answer.mask.tolist() == [0] * len(prompt) + [1] * len(words)
            for pairs, (ids, log_probs) in zip(said(words), answer.top, strict=True):
                pairs = sorted(pairs, key=lambda pair: -pair[1])
                assert ids.tolist() == [i for i, _ in pairs], name
                np.testing.assert_allclose(log_probs, [x for _, x in pairs], rtol=1e-6)
            if name != "own":
                np.testing.assert_allclose(answer.log_probs, [p[0][1] for p in said(words)])


def test_a_spelling_of_no_id_is_left_to_the_rest_but_not_an_answers_own(models):
    tok = tokenizer(models)
    line = lines(tok)["OpenAI"]
    entries = line["choices"][0]["logprobs"]["content"]
    entries[0]["top_logprobs"][2] = {"token": "\ufffd", "logprob": -9.0}
    (answer,) = read_answers(line, "a:1", tok)
    assert [len(ids) for ids, _ in answer.top] == [K - 1, K, K, K]
    entries[1] |= {"token": "\ufffd", "bytes": None}
    with pytest.raises(UserError, match="a:1: found no id of the token '\ufffd'; expected"):
        list(read_answers(line, "a:1", tok))


def test_token_texts_that_do_not_spell_the_answer_are_refused(models):
    """A part of a character comes as U+FFFD, another token's text; ids are always right."""
    tok = tokenizer(models)
    for name, refused in (("OpenAI", True), ("llama.cpp", False)):
        line = lines(tok)[name]
        (answer,) = read_answers(line, "a:1", tok)
        place = line.get("response", line)
        choice = place if name == "llama.cpp" else place["choices"][0]
        written = [i for i in answer.ids[answer.start :].tolist() if i not in tok.stop_ids]
        choice["text"] = tok.decode(written)  # a server's text has no end
        assert len(list(read_answers(line, "a:1", tok))) == 1
        choice["text"] = "another"
        if refused:
            with pytest.raises(UserError, match=r"a:1: found token texts .*Request ids"):
                list(read_answers(line, "a:1", tok))
        else:
            assert len(list(read_answers(line, "a:1", tok))) == 1


def spoil(line, name, place, value):
    line[name][place[0]][place[1]] = value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: spoil(x, "teacher_ids", (1, 2), 10**6), "alternatives .*1000000.*; expected"),
        (lambda x: spoil(x, "teacher_ids", (1, 2), x["teacher_ids"][1][0]), "each id once"),
        (lambda x: spoil(x, "teacher_ids", (1, 2), 2**70), r"no answer of a server \(OverflowErr"),
        (lambda x: spoil(x, "teacher_top_log_probs", (2, 0), 0.1), "add up to 1.*at most 1"),
        (lambda x: spoil(x, "teacher_top_log_probs", (2, 0), float("nan")), "add up to nan"),
        (lambda x: x["tokens"].append(7), r"no answer of a server \(ValueError"),
        (lambda x: x["tokens"].__setitem__(0, 999), "found id 999; expected ids .* below 305"),
        (lambda x: x.pop("start"), r"no answer of a server \(KeyError: 'start'"),
    ],
)
def test_impossible_answers_are_refused_by_their_line(models, change, says):
    tok = tokenizer(models)
    line = lines(tok)["own"]
    change(line)
    with pytest.raises(UserError, match=f"^a.jsonl:3: .*{says}"):
        list(read_answers(line, "a.jsonl:3", tok))


def test_answers_without_what_is_needed_say_what_to_ask_for(models):
    tok = tokenizer(models)
    line = lines(tok)["llama.cpp"]
    line["response"]["usage"] = None
    list(read_answers(line, "a:1", tok))
    line["response"]["tokens_evaluated"] += 1
    with pytest.raises(UserError, match=r"found a prompt of .* tokens at the server and of"):
        list(read_answers(line, "a:1", tok))
    for choice, found in (
        ({"text": "x", "logprobs": None}, "no log-probabilities"),
        ({"completion_probabilities": [{"id": 1, "prob": 0.5, "top_probs": []}]}, "after sampling"),
    ):
        with pytest.raises(UserError, match=f"{found}.*n_probs=N"):
            list(read_answers({"prompt": "x", "choices": [choice]}, "a:1", tok))


# ---- a cache of them


@pytest.fixture
def answered(models, tiny_config, tmp_path):
    """A config whose text is 24 answers of 5 to 40 tokens, one of 100, and what each says."""
    tok, rng, answers = tokenizer(models), np.random.default_rng(1), {}
    path = tmp_path / "answers.jsonl"
    with path.open("w") as file:
        for number, length in enumerate([*rng.integers(5, 40, 24).tolist(), 100]):
            words = rng.integers(0, 250, length).tolist()
            top = said(words, number, K + number % 2)
            prompt = tok.encode(f"{number} = ")
            for at, pairs in enumerate(top):
                answers[tuple([*prompt, *words][: len(prompt) + at + 1][-6:])] = dict(pairs)
            line = {"tokens": [*prompt, *words], "start": len(prompt)}
            line["teacher_ids"] = [[i for i, _ in pairs] for pairs in top]
            line["teacher_top_log_probs"] = [[x for _, x in pairs] for pairs in top]
            file.write(json.dumps(line) + "\n")
    config = tiny_config
    config.teacher.path, config.data.train, config.data.seq_len = "", str(path), 48
    config.data.heldout_fraction, config.loss.temperature, config.loss.alpha = 0.3, 1.0, 0.0
    config.teacher.cache = str(tmp_path / "cache")
    config.train.batch_size, config.train.microbatches, config.train.steps = 8, 1, 4
    config.eval.every = config.checkpoint.every = 0
    return config, answers


def test_held_out_text_is_what_the_writer_read(models, tmp_path):
    """By its own ids, however its text would be encoded anew; its prompt is no target."""
    tok = tokenizer(models)
    own = lines(tok)["own"]
    ids = [*own["tokens"], *tok.encode("日é"), tok.encode("é")[0]]  # it ends within a character
    count = len(ids) - own["start"]
    own = {"tokens": ids, "start": own["start"], "teacher_ids": [[i] for i in ids[-count:]]}
    own["teacher_top_log_probs"] = [[-0.5]] * count
    (tmp_path / "a.jsonl").write_text(json.dumps(own))
    held = heldout.read_text(f"{tmp_path}/a.jsonl", tok, rows=1, seq_len=64)
    assert held.rows.tokens[0, : len(ids)].tolist() == ids
    assert held.rows.mask[0].sum() == count and held.rows.mask[0, len(ids) - 1]
    assert held.bytes[0].sum() == len(tok.decode(ids).encode())


def read_cached(columns, at):
    """Probabilities by id, and the rest's."""
    ids = columns["teacher_ids"][at].astype(int) @ np.array([1, 256, 65536])
    logits = columns["teacher_logits"][at].astype(float)
    odds = float(columns["teacher_odds"][at, 0])
    inside = np.exp(logits - logsumexp(logits)) * expit(-odds)
    return dict(zip(ids.tolist(), inside.tolist(), strict=True)), expit(odds)


@pytest.mark.parametrize(("rest", "long"), [("tail", "leave_out"), ("absent", "cut")])
def test_every_trained_position_has_what_was_said_of_its_label(answered, tmp_path, rest, long):
    """Whatever row and place packing gave it; of one longer than a row the end, or nothing."""
    config, answers = answered
    config.data.long = long
    cache_answers(config, tmp_path / "cache", None, rest=rest)
    config_module.validate(config)
    job = assemble(config, tmp_path / "run")
    assert job.teacher is None and job.kind.k == K and job.rows.heldout.tokens.shape[0] > 0
    seen = 0
    for side, rows in ((job.cache.train, job.rows.train), (job.cache.heldout, job.rows.heldout)):
        for row in range(len(rows)):
            columns, tokens = side[row], rows.tokens[row].astype(int).tolist()
            for at in np.flatnonzero(rows.mask[row][1:]):
                if at < 5 or rows.segments[row][at - 4] != rows.segments[row][at + 1]:
                    continue  # its context begins elsewhere
                want = answers[tuple(tokens[at - 4 : at + 2])]
                likeliest = dict(sorted(want.items(), key=lambda pair: -pair[1])[:K])
                scale = 1.0 if rest == "tail" else 1 / sum(map(np.exp, likeliest.values()))
                got, tail = read_cached(columns, at)
                assert got == pytest.approx(
                    {i: scale * np.exp(x) for i, x in likeliest.items()}, rel=2e-3
                )
                left = 1 - sum(map(np.exp, likeliest.values())) if rest == "tail" else 0.0
                assert tail == pytest.approx(left, rel=1e-4, abs=1e-9)
                seen += 1
    assert seen > 300
    # 24 of the 25 fit in a row.
    sides = job.rows.train, job.rows.heldout
    pieces = sum(int(side.segments.max(axis=1).sum()) for side in sides)
    assert pieces == 24 + (long == "cut")


@pytest.mark.slow
def test_a_step_from_the_cache_is_that_of_a_teacher_in_the_batch(answered, models, tmp_path):
    """Whose loss is the formula's in float64 (tests/test_teacher_in_batch.py)."""
    config, _ = answered
    cache_answers(config, tmp_path / "cache", None)
    job = assemble(config, tmp_path / "run")
    batch = job.source.next(None)
    _, metrics = job.step(job.make_state(), {}, batch)
    rows, length = batch["tokens"].shape
    ids, log_probs = (np.zeros((rows, length, K), t) for t in (np.int32, np.float32))
    for row, at in np.argwhere(batch["weights"]):
        said, _ = read_cached({n: x[row] for n, x in batch.items() if x.ndim > 1}, at)
        ids[row, at], log_probs[row, at] = list(said), np.log(list(said.values()))
    columns = {n: x for n, x in batch.items() if not n.startswith("teacher")}
    columns |= {"teacher_ids": ids, "teacher_top_log_probs": log_probs}
    student = kdjax.load(models / "student.gguf", dtype="float32")
    kind = kdjax.TeacherInBatch(rest="tail")
    step = kdjax.make_step(student, None, kdjax.KDLoss(), optax.sgd(0.1), kind=kind)
    _, others = step(step.init(student.params), None, columns)
    assert metrics.means()["loss"] == pytest.approx(others.means()["loss"], rel=1e-4)
    config.train.steps, config.eval.every, config.optim.warmup_steps = 2, 1, 0
    assert kdjax.distill(config, tmp_path / "whole") == "finished"
    last = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kl_topk"] > 0
    assert verify_command([str(tmp_path / "whole")]) == FINISHED


@pytest.mark.slow
def test_the_command_writes_it_and_refuses_what_cannot_be(
    answered, models, tmp_path, capfd, monkeypatch
):
    config, _ = answered
    path = tmp_path / "config.py"
    fields = dataclasses.asdict(config)
    path.write_text(
        "from kdjax.config import Config, read_section\n"
        f"def get_config(): return read_section(Config(), {fields!r})\nSUITS_CPU = True\n"
    )
    run = lambda *flags: cache_command([f"--config={path}", *flags])  # noqa: E731
    answers, out = f"--from={config.data.train}", f"--out={tmp_path / 'out'}"
    assert run(answers, out, "--config.teacher.cache=", "--config.loss.alpha=1") == FINISHED
    assert "train from it: --config.teacher.path= --config.teacher.cache=" in capfd.readouterr().err
    for flags, says in (
        (["--k=5"], "found a token with 4 alternatives and --k=5"),
        (["--k=0"], "found --k=0; expected 1 to"),
        (["--k=-1"], "found --k=-1; expected 1 to"),
        (["--all"], "all answers are kept"),
        (["--kind=hidden"], "answers have no hidden states"),
        (["--config.loss.temperature=2"], "temperature=2 and rest='tail'"),
        (["--config.data.heldout=" + str(path)], "found text without a teacher's log-prob"),
    ):
        assert (
            run(answers, f"--out={tmp_path / 'other'}", "--config.loss.alpha=1", *flags)
            == BAD_INPUT
        )
        error = capfd.readouterr().err
        assert re.search(re.escape(says), error) and "Traceback" not in error
    again = ["--config.teacher.cache=", "--config.loss.alpha=1", "--rest=absent"]
    assert run(answers, out, *again) == BAD_INPUT
    assert "settings: the cache has {}, this run {'rest': 'absent'}" in capfd.readouterr().err
    for flags, says in (
        (["--rest=absent"], "--rest is for --from"),
        (["--kind=hidden", "--k=2"], "--k is for --kind=topk"),
    ):
        assert run(out, *flags) == BAD_INPUT
        assert says in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_from_several_caches_takes_their_weighted_losses(answered, tmp_path):
    """Resumed exactly, too: their hash, weights in it, is part of the run's identity."""
    config, _ = answered
    losses, folders = [], []
    for k, rest in ((4, "tail"), (2, "absent")):
        folders.append(tmp_path / f"cache{k}")
        cache_answers(config, folders[-1], k, rest=rest)
    several = f"0.7*{folders[0]},0.3*{folders[1]}"
    hashes = set()
    for text in (*map(str, folders), several, f"{folders[0]},{folders[1]}"):
        config.teacher.cache = text
        config_module.validate(config)
        job = assemble(config, tmp_path / "run")
        hashes.add(job.identity["teacher.cache"])
        assert job.identity == identify(config, hash_contents(config))
        if text.startswith("/") and "," in text:
            break
        _, metrics = job.step(job.make_state(), {}, job.source.next(None))
        losses.append(metrics.means()["loss"])
    assert len(hashes) == 4
    assert losses[2] == pytest.approx(0.7 * losses[0] + 0.3 * losses[1], rel=1e-5)
    config.teacher.cache, config.train.steps = several, 2
    config.eval.every, config.optim.warmup_steps = 1, 0
    assert kdjax.distill(config, tmp_path / "whole") == "finished"
    assert verify_command([str(tmp_path / "whole")]) == FINISHED


def test_names_of_several_caches_are_read_and_refused(answered, tmp_path):
    assert split_caches("a") == [(1.0, Path("a"))]
    assert split_caches("a, b") == [(0.5, Path("a")), (0.5, Path("b"))]
    assert split_caches("0.7*a,0.3*b") == [(0.7, Path("a")), (0.3, Path("b"))]
    folders = "expected folders by commas"
    for text, says in (
        ("0.7*a,0.7*b", "their sum 1"),
        ("0.7*a", "their sum 1"),
        ("x*a,b", folders),
        ("a,", folders),
        ("0.7*a,0.3*", folders),
    ):
        with pytest.raises(UserError, match=says):
            split_caches(text)
    config, _ = answered
    cache_answers(config, tmp_path / "cache", None)
    config.teacher.cache = f"{tmp_path}/cache,{tmp_path}/cache"
    config.teacher.path = config.student.path
    with pytest.raises(UserError, match=r"of 2 caches and teacher.path=.*; expected"):
        ask_kinds(config.teacher)
