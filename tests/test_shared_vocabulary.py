"""A teacher of another tokenizer: ids, positions, the loss and its gradient, against references."""

import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kdjax
from kdjax.config import Config
from kdjax.data.rows import tokenize_documents
from kdjax.data.text import documents, render_records
from kdjax.errors import UserError
from kdjax.evaluation.heldout import measure, read_text
from kdjax.evaluation.target import open_target
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.models.alignment import REASONS, list_segments, map_tokens, read_batch
from kdjax.models.kernels import softmax
from kdjax.training import inputs
from kdjax.training.pair import Pair, choose_vocabulary
from kdjax.training.step import assemble_step
from kdjax.training.teachers import CachedHidden, CachedTopK, Dense, RunningTeacher
from kdjax.training.vocabulary import Reread, share_tokens
from kdjax.watch.guards import SharedGuard
from scripts.bench.made_tokenizers import make_byte_level, make_sentencepiece
from scripts.bench.peer_losses import PEERS, find_spans

TEXTS = [
    "The quick brown fox jumps over the lazy dog. naïve café, déjà vu.",
    "    if x == 10:\n        return 2025  # 日本語のテキスト\n\n\nend",
    "Once upon a time, there was 1 little girl named Zoë and 365 days.",
    " leading space, and \N{GRINNING FACE} twice \N{GRINNING FACE}\N{GRINNING FACE}!",
]
MAKERS = {"byte-level": make_byte_level, "sentencepiece": make_sentencepiece}


@functools.cache
def tokenizer(kind, size):
    return MAKERS[kind](TEXTS * 3, size)


PAIRS = [
    (("byte-level", 300), ("byte-level", 380)),
    (("sentencepiece", 330), ("byte-level", 360)),
    (("byte-level", 340), ("sentencepiece", 380)),
    (("sentencepiece", 320), ("sentencepiece", 370)),
]


def pack(ids, tokenizer, length, rng):
    """A batch of one row a piece: whole texts, and pieces that begin and end anywhere."""
    rows = []
    for text in ids:
        whole = [*text, tokenizer.end_of_text_id]
        rows.append(whole[: length + 1])
        start = int(rng.integers(1, 8))
        rows.append(whole[start : start + int(rng.integers(8, 24))])
    tokens = np.zeros((len(rows), length + 1), np.int32)
    segments = np.zeros((len(rows), length + 1), np.int32)
    for n, row in enumerate(rows):
        tokens[n, : len(row)], segments[n, : len(row)] = row, 1
    weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] != 0)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segment_ids": segments[:, :-1],
        "positions": np.tile(np.arange(length, dtype=np.int32), (len(rows), 1)),
        "weights": weights.astype(np.float32),
    }


def prefixes(ids, tokenizer, cut):
    """The bytes up to and with each id, the end of a text as one more that no text has."""
    said, out = b"", []
    for i in ids:
        said += b"\xff" if i == tokenizer.end_of_text_id else tokenizer.spelled[i]
        out.append(said.removeprefix(b" ") if cut else said)
    return out


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_compared_positions_are_those_of_equal_bytes_before_and_after(ours, theirs):
    """A search over all pairs of prefixes, byte by byte."""
    student, teacher = tokenizer(*ours), tokenizer(*theirs)
    tokens = map_tokens(student, teacher, teacher.vocab_size)
    batch = pack(student.encode_batch(TEXTS), student, 96, np.random.default_rng(0))
    columns, compared = read_batch(tokens, batch, {}), 0
    for n in range(len(batch["tokens"])):
        mine = [batch[x][n] for x in ("tokens", "labels", "segment_ids", "weights")]
        ((start, stop, ids),) = list_segments(*mine)
        assert start == 0
        row = columns["teacher_tokens"][n][columns["teacher_segment_ids"][n] == 1]
        # A text of SentencePiece's begins with a space that is not the text's.
        sides = (
            prefixes(ids, student, ours[0] == "sentencepiece"),
            prefixes(row, teacher, theirs[0] == "sentencepiece"),
        )
        for t in range(stop - 1):
            place = columns["teacher_places"][n, t]
            same = [u for u in range(len(row) - 1) if sides[1][u] == sides[0][t]]
            expected = [u for u in same if sides[1][u + 1] == sides[0][t + 1]]
            if place >= 0:
                compared += 1
                assert place in expected
                assert tokens.teacher_ids[ids[t + 1]] == row[place + 1]
            elif place in (-1, -2):
                assert not expected
    assert compared > 20


def test_ids_are_mapped_by_bytes_and_ends_by_role():
    student, teacher = tokenizer("sentencepiece", 330), tokenizer("byte-level", 360)
    tokens = map_tokens(student, teacher, teacher.vocab_size)
    for i, other in enumerate(tokens.teacher_ids):
        if other >= 0 and i not in student.special_ids:
            assert student.spelled[i] == teacher.spelled[other]
    assert tokens.teacher_ids[student.eos_id] == teacher.eos_id
    assert tokens.teacher_ids[student.tokens.index("<unk>")] == -1
    # "A" is a token; the byte 0x41, which never stands for it, is none of its own.
    assert tokens.teacher_ids[student.tokens.index("<0x74>")] == -1
    letter = student.tokens.index("t")
    assert teacher.spelled[tokens.teacher_ids[letter]] == b"t"
    assert tokens.teacher_ids[student.tokens.index("<0xF0>")] >= 0
    assert len(set(tokens.teacher_ids[tokens.teacher_ids >= 0])) == tokens.shared


def test_numbers_and_indentation_are_masked_where_other_tokens_are_known():
    single = make_byte_level(["ab cd " * 9], 270)
    several = make_byte_level(["1234 1234 x\n        y\n        z " * 9], 300)
    tokens = map_tokens(single, several, several.vocab_size)
    text = "x 7 y\n        z"
    batch = pack([single.encode(text)], single, 40, np.random.default_rng(0))
    places = read_batch(tokens, batch, {})["teacher_places"][0]
    ids = [*single.encode(text), single.end_of_text_id]
    digit = ids.index(single.tokens.index("7"))
    assert REASONS[-1 - places[digit - 1]] == "digits"


def reference(hidden, head, places, theirs, their_head, labels, weights, ids, loss):
    """The loss in float64: renormalised over the shared ids where positions are compared."""

    def log_softmax(x):
        x = x - x.max()
        return x - np.log(np.exp(x).sum())

    mine = [i for i, other in enumerate(ids) if other >= 0]
    other = [ids[i] for i in mine]
    total = 0.0
    for b, t in itertools.product(*map(range, weights.shape)):
        if not weights[b, t]:
            continue
        s = hidden[b, t] @ head.T
        ce = -log_softmax(s)[labels[b, t]]
        if places[b, t] < 0:  # the text teaches alone
            total += ce
            continue
        total += loss.alpha * ce
        x = their_head @ theirs[b, places[b, t]]
        log_p = log_softmax(s[mine] / loss.temperature)
        log_q = log_softmax(x[other] / loss.temperature)
        p, q = np.exp(log_p), np.exp(log_q)
        m = (p + q) / 2
        value = {
            "ForwardKL": (q * (log_q - log_p)).sum(),
            "ReverseKL": (p * (log_p - log_q)).sum(),
            "JensenShannon": (q * (log_q - np.log(m)) + p * (log_p - np.log(m))).sum() / 2,
        }[type(loss.divergence).__name__]
        total += (1 - loss.alpha) * loss.temperature**2 * value
    return total


class Head:
    """A teacher of which only the head is used."""

    def stored_head(self, params):
        return params


@pytest.mark.parametrize(
    ("pair", "loss", "kernels"),
    [
        (PAIRS[0], KDLoss("forward_kl", 2.0, 0.3), False),
        (PAIRS[1], KDLoss("forward_kl", 2.0, 0.3), True),
        (PAIRS[1], KDLoss("forward_kl", 1.0, 0.0), False),
        (PAIRS[2], KDLoss("reverse_kl", 1.5, 0.2), False),
        (PAIRS[3], KDLoss("jsd", 1.0, 0.1), False),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_references(pair, loss, kernels, monkeypatch):
    student, teacher = (tokenizer(*one) for one in pair)
    vocabulary = share_tokens(student, teacher, student.vocab_size + 5, teacher.vocab_size + 3)
    rng = np.random.default_rng(1)
    batch = pack(student.encode_batch(TEXTS[:2]), student, 24, rng)
    batch = vocabulary.complete(batch)
    shape = batch["tokens"].shape
    hidden, theirs = rng.normal(size=(*shape, 4)), rng.normal(size=(*shape, 3))
    head = rng.normal(size=(student.vocab_size + 5, 4))
    their_head = rng.normal(size=(teacher.vocab_size + 3, 3))
    real = head[: student.vocab_size]
    ids = vocabulary.tokens.teacher_ids.tolist()
    places, columns = batch["teacher_places"], (batch["labels"], batch["weights"])
    known = places, theirs, their_head, *columns, ids, loss
    spec = HeadSpec(loss, vocabulary.width, vocabulary.real, chunk_tokens=40, kernels=kernels)
    interpreted = functools.partial(softmax.softmax_sums, interpret=jax.default_backend() != "gpu")
    monkeypatch.setattr(softmax, "softmax_sums", interpreted)
    kind = Reread(CachedHidden(), vocabulary.ids)
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    arrays["teacher_hidden"] = jnp.asarray(theirs, jnp.float32)
    running = RunningTeacher(Head(), jnp.asarray(their_head, jnp.float32))

    def compute(hidden, head):
        return kind.sum_loss((hidden, head), running, arrays, spec).loss

    float32 = [jnp.asarray(x, jnp.float32) for x in (hidden, head)]
    value, gradients = jax.value_and_grad(compute, (0, 1))(*float32)
    np.testing.assert_allclose(value, reference(hidden, real, *known), rtol=3e-6)
    assert (places >= 0).any() and ((places < 0) & (batch["weights"] != 0)).any()
    for _ in range(12):  # directions
        moves = [rng.normal(size=x.shape) for x in (hidden, head)]
        moves[1][student.vocab_size :] = 0
        step = 1e-5
        both = [
            reference(
                hidden + sign * step * moves[0],
                (head + sign * step * moves[1])[: student.vocab_size],
                *known,
            )
            for sign in (1, -1)
        ]
        slope = (both[0] - both[1]) / (2 * step)
        found = sum(
            float((np.asarray(g, np.float64) * m).sum())
            for g, m in zip(gradients, moves, strict=True)
        )
        np.testing.assert_allclose(found, slope, rtol=2e-4, atol=2e-4)
    assert not np.asarray(gradients[1])[student.vocab_size :].any()


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "alpha"), [(3.0, 0.3), (1.0, 0.0)])
def test_one_tokenizer_is_todays_loss_bit_for_bit(models, temperature, alpha):
    student = kdjax.load(models / "student.gguf", dtype="float32", devices=jax.devices()[:1])
    teacher = kdjax.load(models / "teacher.gguf", devices=jax.devices()[:1])
    ids = student.tokenizer
    ours, theirs = student.vocab_size, teacher.vocab_size
    shared = share_tokens(ids, teacher.tokenizer, ours, theirs)
    assert shared.tokens.complete
    rng, rows = np.random.default_rng(0), []
    for _ in range(4):
        rows.append(rng.integers(0, 150, 25, dtype=np.int32))
    batch = {"tokens": np.stack(rows)[:, :-1], "labels": np.stack(rows)[:, 1:]}
    loss, ends = KDLoss(temperature=temperature, alpha=alpha), []
    for vocabulary in (None, shared):
        make = functools.partial(assemble_step, student, teacher)
        if vocabulary is None:
            step = kdjax.make_step(student, teacher, loss, optax.sgd(0.1), microbatches=2)
        else:
            step = make(vocabulary, loss, optax.sgd(0.1), microbatches=2, kind=Dense())
        state = step.init(student.params)
        figures = []
        for _ in range(2):
            state, metrics = step(state, teacher.params, batch)
            figures.append(metrics.means())
        ends.append(
            (jax.device_get(state.params), figures, step.evaluate(state, teacher.params, [batch]))
        )
    (params, figures, held), (other, others, held_there) = ends
    assert figures == others
    jax.tree.map(np.testing.assert_array_equal, params, other)
    assert held_there["compared"] == 1 and held_there["teacher_mass"] == pytest.approx(1, abs=1e-6)
    for name in ("loss", "student_ce", "teacher_ce", "kl", "agreement"):
        assert held_there[name] == pytest.approx(held[name], rel=2e-6)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "You help.\n{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


@pytest.fixture(params=MAKERS)
def chats(request):
    """A student and a teacher with a template each, whose turns end by different marks."""
    student = make_byte_level(
        TEXTS * 3, 320, end="<|im_end|>", template=CHATML, marks=["<|im_start|>"]
    )
    make = MAKERS[request.param]
    teacher = make(TEXTS * 3, 370, end="<end>", template=TURNS, marks=["<turn>"])
    return student, teacher


def decode_turns(teacher, ids):
    """The text of a row, without the spaces that SentencePiece puts there and after marks."""
    return teacher.decode(ids.tolist()).removeprefix(" ").replace("<turn> ", "<turn>")


def test_of_conversations_answers_alone_are_compared_each_in_its_template(chats, tmp_path):
    student, teacher = chats
    messages = [
        {"role": "user", "content": "The quick brown fox?"},
        {"role": "assistant", "content": "Once upon a time, there was a lazy dog."},
        {"role": "user", "content": "There was?"},
        {"role": "assistant", "content": "The fox jumps, naïve café."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    ((ours, theirs),) = render_records([path], student, teacher)
    vocabulary.learn([(ours, theirs)])
    ids, length = np.asarray(ours.ids, np.int32), 160
    row = np.zeros(length, np.int32)
    row[: len(ids)] = ids
    segments = (np.arange(length) < len(ids)).astype(np.int32)
    ((_, _, mask),) = tokenize_documents(documents([path], student), student, student.eos_id)
    weights = np.zeros(length, np.float32)
    weights[: len(ids) - 1] = mask[1:]
    labels = np.append(row[1:], 0).astype(np.int32)
    batch = {"tokens": row[None], "labels": labels[None], "segment_ids": segments[None]}
    batch = vocabulary.complete(batch | {"weights": weights[None]})
    places, read = batch["teacher_places"][0], batch["teacher_tokens"][0]
    assert decode_turns(teacher, read[: len(theirs.ids)]) == theirs.text
    compared = np.flatnonzero(places >= 0)
    assert set(compared) <= set(np.flatnonzero(weights))
    answers = [m["content"].encode() for m in messages if m["role"] == "assistant"]
    heads = {a[:n] for a in answers for n in range(len(a) + 1)}
    for t in compared:  # both have read the same beginning of an answer
        for tokenizer, line, at in ((student, ids, t), (teacher, read, places[t])):
            said = b"".join(tokenizer.spelled[i] for i in line[: at + 1])
            said = said.rpartition(b"assistant" + (b"\n" if tokenizer is student else b": "))[2]
            assert said in heads
    ends = [t for t in compared if labels[t] == student.eos_id]
    assert len(ends) == 2 and all(read[places[t] + 1] == teacher.eos_id for t in ends)
    assert len(compared) > 6
    own = batch["teacher_byte_weights"][0] > 0
    targets = teacher.decode(batch["teacher_labels"][0][own].tolist())
    assert targets == "".join(m["content"] + "<end>" for m in messages[1::2])


def test_tokens_that_end_within_a_character_have_places_of_their_own():
    student, teacher = tokenizer("byte-level", 300), tokenizer("sentencepiece", 380)
    tokens = map_tokens(student, teacher, teacher.vocab_size)
    text = "日本語 \N{GRINNING FACE} naïve"
    ids = np.array(student.encode(text), np.int32)
    (reading,) = tokens.read_texts([np.append(ids, student.eos_id)])
    assert reading.ids[-1] == teacher.eos_id
    place = reading.places[len(ids) - 1]
    assert reading.ids[place + 1] == teacher.eos_id
    # Bytes of a character are tokens to both.
    assert (reading.places[:8] >= 0).any()
    for start in range(1, 6):  # a row that begins within a character
        (cut,) = tokens.read_texts([ids[start:]])
        assert len(cut.places) == len(ids) - start


def test_text_is_not_compared_after_what_is_no_text():
    student, teacher = tokenizer("byte-level", 300), tokenizer("byte-level", 380)
    tokens = map_tokens(student, teacher, teacher.vocab_size)
    good = student.encode("Once upon a time")
    broken = student.spelled.index(b"\xff")
    row = np.array([*good, broken, *good], np.int32)
    (reading,) = tokens.read_texts([row])
    assert (reading.places[: len(good) - 2] >= 0).any()
    assert (reading.places[len(good) - 1 :] < 0).all()


def test_what_does_not_go_with_two_tokenizers_is_refused():
    student, teacher = tokenizer(*PAIRS[1][0]), tokenizer(*PAIRS[1][1])
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    for kind in (CachedTopK(8), kdjax.TeacherInBatch()):
        with pytest.raises(UserError, match="two tokenizers and a teacher of the kind"):
            vocabulary.adapt(kind, ())
    with pytest.raises(UserError, match="losses of layers"):
        vocabulary.adapt(Dense(), (object(),))
    vocabulary.refuse("", "")
    with pytest.raises(UserError, match="differ at id"):
        choose_vocabulary(400, 400, student, teacher, "same")
    assert choose_vocabulary(400, 400, student, teacher).record["shared_ids"] > 200


def test_too_few_positions_stop_a_run(caplog):
    student, teacher = tokenizer("byte-level", 340), tokenizer("sentencepiece", 380)
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    batch = pack(student.encode_batch(TEXTS), student, 64, np.random.default_rng(0))
    with caplog.at_level("INFO", "kdjax"):
        vocabulary.sample([batch], allow_few=True)
    assert "% of positions are compared; masked: " in caplog.text
    assert "weighs loss.alpha where compared, else 1" in caplog.text
    shares = vocabulary.record["positions"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compared"] < 0.5
    with pytest.raises(UserError, match="cut the text too differently"):
        vocabulary.sample([batch], allow_few=False)
    SharedGuard(False).eval_end(0, {"teacher_mass": 0.95})
    SharedGuard(True).eval_end(0, {"teacher_mass": 0.5})
    SharedGuard(False).eval_end(7, {"teacher_mass": 0.5})  # a run that goes on
    with pytest.raises(UserError, match=r"50\.0% of the teacher's probability"):
        SharedGuard(False).eval_end(0, {"teacher_mass": 0.5})


def make_pair(models, devices, weights):
    """A student whose tokenizer is replaced by another, and its teacher, on the devices."""
    devices = jax.devices()[:devices]
    student = kdjax.load(models / "student.gguf", dtype="float32", devices=devices)
    teacher = kdjax.load(models / "teacher.gguf", weights=weights, devices=devices)
    return student.replace(own_tokenizer=tokenizer("byte-level", 300)), teacher


@pytest.mark.slow
def test_make_step_of_two_tokenizers_alike_for_devices_kinds_and_parts(models):
    """The library: nothing is set; packed and dense teachers, one device and two, parts or none."""
    texts = [text for text in TEXTS for _ in range(2)]
    batch = pack(
        tokenizer("byte-level", 300).encode_batch(texts)[::2],
        tokenizer(*PAIRS[0][0]),
        48,
        np.random.default_rng(0),
    )
    ends = []
    runs = (1, "dense", 1), (1, "packed", 2), (2, "dense", 2), (1, "float8", 1)
    for devices, weights, parts in runs:
        student, teacher = make_pair(models, devices, weights)
        step = kdjax.make_step(
            student, teacher, KDLoss(alpha=0.2), optax.sgd(0.1), microbatches=parts
        )
        state = step.init(student.params)
        held = step.evaluate(state, teacher.params, [batch])
        assert 0 < held["compared"] < 1 and 0 < held["teacher_mass"] <= 1
        state, metrics = step(state, teacher.params, batch)
        means = metrics.means()
        assert means["loss"] == pytest.approx(held["loss"], rel=1e-4)
        ends.append((jax.device_get(state.params), means, held))
    *ends, (_, means, held) = ends
    for name, value in (ends[0][1] | ends[0][2]).items():  # float8 rounds the teacher
        assert (means | held)[name] == pytest.approx(value, rel=0.02), name
    for params, means, held in ends[1:]:
        assert means == pytest.approx(ends[0][1], rel=2e-4)
        assert held == pytest.approx(ends[0][2], rel=2e-4, abs=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), params, ends[0][0]
        )


def test_evaluate_compares_models_of_two_tokenizers(models, mesh, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS) * 4)
    student, teacher = (open_target(str(models / f"{x}.gguf")) for x in ("student", "teacher"))
    other = dataclasses.replace(student.checkpoint)
    vars(other)["tokenizer"] = tokenizer("byte-level", 300)
    target = student._replace(checkpoint=other)
    text = {"text": read_text(str(path), other.tokenizer, rows=4, seq_len=48)}
    (one,) = measure(target, teacher, text, mesh, batch_size=2).values()
    overall = one["overall"]
    assert 0 < overall["compared"] < 1
    for name in ("kl_ts", "kl_st", "jsd", "top1", "teacher_ce"):
        assert np.isfinite(overall[name])
    (alone,) = measure(target, None, text, mesh, batch_size=2).values()
    assert overall["ce"] == pytest.approx(alone["overall"]["ce"], rel=1e-5)
    assert overall["bits_per_byte"] == pytest.approx(alone["overall"]["bits_per_byte"], rel=1e-5)


def test_a_teacher_without_a_template_is_refused_before_text_is_packed(tmp_path, monkeypatch):
    student = make_byte_level(TEXTS * 3, 320, end="<|im_end|>", template=CHATML)
    teacher = make_byte_level(TEXTS * 3, 370)
    turns = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "y = 2"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    config = Config()
    config.data.train = str(tmp_path / "chats.jsonl")
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    models = {"tokenizer": student, "teacher": SimpleNamespace(tokenizer=teacher)}
    pair = mock.Mock(spec=Pair, vocabulary=vocabulary, **models)
    monkeypatch.setattr(inputs, "prepare", lambda *_: pytest.fail("packed the text"))
    with pytest.raises(UserError, match=r"chats.jsonl:1: the tokenizer has no .*the teacher's"):
        inputs.prepare_all(config, pair)


def test_a_students_answer_is_read_after_the_prompt_in_the_teachers_template(chats):
    student, teacher = chats
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    asked = [{"role": "user", "content": "The quick brown fox?"}]
    prompts = [x.render(asked, answer_next=True) for x in (student, teacher)]
    vocabulary.learn_prompts([tuple(prompts)])
    prompt = student.encode(prompts[0])
    ids = np.array([*prompt, *student.encode("Once upon a time, café."), student.eos_id], np.int32)
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[len(prompt) - 1 :] = 1
    batch = {"tokens": ids[:-1], "labels": ids[1:], "weights": weights}
    batch |= {"segment_ids": np.ones(len(ids) - 1, np.int32)}
    batch = vocabulary.complete({name: np.pad(x, (0, 40))[None] for name, x in batch.items()})
    row = batch["teacher_tokens"][0][batch["teacher_segment_ids"][0] == 1]
    assert decode_turns(teacher, row) == prompts[1] + "Once upon a time, café.<end>"
    places = batch["teacher_places"][0][: len(weights)]
    assert (places[weights == 0] < 0).all() and (places[weights == 1] >= 0).any()
    assert row[places[-1] + 1] == teacher.eos_id


def split_spans(ids, theirs, student, teacher, pair):
    """Pairs of lists of indices: tokens of both that spell the bytes between two common ends."""
    sides = [
        prefixes(line, one, kind == "sentencepiece")
        for line, one, (kind, _) in ((ids, student, pair[0]), (theirs, teacher, pair[1]))
    ]
    ends = [(t, u) for t, x in enumerate(sides[0]) for u, y in enumerate(sides[1]) if x == y]
    ends = [end for end in ends if not sides[0][end[0]].endswith(b"\xff")]
    return [
        (list(range(a + 1, c + 1)), list(range(b + 1, d + 1)))
        for (a, b), (c, d) in itertools.pairwise(ends)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
def test_losses_of_other_projects_are_as_defined(pair):
    """GOLD's and ULD's, in float64 by loops; TRL 1.16 has these values (the record compares)."""
    student, teacher = (tokenizer(*one) for one in pair)
    vocabulary = share_tokens(student, teacher, student.vocab_size, teacher.vocab_size)
    line = np.array([*student.encode(TEXTS[0]), student.end_of_text_id], np.int32)
    batch = {"tokens": line[None, :-1], "labels": line[None, 1:]}
    batch |= {"segment_ids": np.ones_like(batch["tokens"])}
    batch |= {"weights": np.ones(batch["tokens"].shape, np.float32)}
    batch = vocabulary.complete(batch)
    batch |= find_spans(vocabulary.tokens, batch)
    rng, length = np.random.default_rng(3), len(line) - 1
    logits = [rng.normal(size=(1, length, one.vocab_size)) * 2 for one in (student, teacher)]
    theirs = batch["teacher_tokens"][0][batch["teacher_segment_ids"][0] == 1].tolist()
    p, q = (np.exp(x[0]) / np.exp(x[0]).sum(-1, keepdims=True) for x in logits)
    ids = vocabulary.tokens.teacher_ids

    def add_sorted(x, y):
        x, y = (np.sort(side)[::-1] for side in (x, y))
        width = max(len(x), len(y))
        return np.abs(np.pad(x, (0, width - len(x))) - np.pad(y, (0, width - len(y)))).sum()

    mine = np.flatnonzero(ids >= 0)
    rest = [np.delete(np.arange(student.vocab_size), mine)]
    rest.append(np.delete(np.arange(teacher.vocab_size), ids[mine]))
    weight, values = len(mine) / teacher.vocab_size, []
    spans = split_spans(line.tolist(), theirs, student, teacher, pair)
    for ours, others in spans:
        x, y = p[ours[-1] - 1].copy(), q[others[-1] - 1].copy()
        for i in ours[:-1]:
            x *= p[i - 1, line[i]]
        for i in others[:-1]:
            y *= q[i - 1, theirs[i]]
        a, b = (np.maximum(side, 1e-8) for side in (x[mine], y[ids[mine]]))
        m = (a + b) / 2
        value = weight * ((b * np.log(b / m)).sum() + (a * np.log(a / m)).sum()) / 2
        if len(rest[0]) and len(rest[1]):
            value += (1 - weight) * add_sorted(x[rest[0]], y[rest[1]])
        values.append(value)
    assert max(len(ours) for ours, _ in spans) > 1 and len(spans) > 20
    count = min(length, len(theirs) - 1)
    expected = {"gold": values, "uld": [add_sorted(p[n], q[n]) for n in range(count)]}
    for name, wanted in expected.items():
        kind = PEERS[name](CachedHidden(), vocabulary.ids)
        arrays = [jnp.asarray(x, jnp.float32) for x in logits]
        columns = {column: jnp.asarray(x) for column, x in batch.items()}
        found, counts = kind.compare(*arrays, columns, ids)
        assert counts.sum() == len(wanted)
        np.testing.assert_allclose(found[counts != 0], wanted, rtol=2e-5)
