"""A model's own writing as the text of `kdjax shrink`: its word, its files, and going on."""

import dataclasses
import json

import pytest

import kdjax
from kdjax.data.conversations import Conversation
from kdjax.errors import UserError
from kdjax.evaluation import answers, own_text
from kdjax.evaluation.own_text import OwnText

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def model(models):
    return kdjax.load(models / "student.gguf", dtype="float32")


def test_its_word_stands_among_other_sources(tmp_path):
    assert OwnText.find("a.txt,python:own,flax", tmp_path) is None
    found = OwnText.find("own:12,a.txt,b/*.md,python:flax,optax", tmp_path)
    assert found is not None
    assert (found.texts, found.others) == (12, "a.txt,b/*.md,python:flax,optax")
    alone = OwnText.find("own", tmp_path)
    assert alone is not None and alone.others == ""
    assert 10 < alone.fill("cpu").texts < alone.fill("gpu").texts / 10
    assert found.fill("gpu") == found
    assert OwnText.find("./own", tmp_path) is None  # a folder of this name
    for wrong in ("own:1", "own:x", "own:", "own:-3", "own:1e3"):
        with pytest.raises(UserError, match=f"found {wrong}; expected 2 texts or more"):
            OwnText.find(f"a.txt,{wrong}", tmp_path)
    with pytest.raises(UserError, match=r"a,b, whose files .* Name another --work"):
        OwnText.find("own", tmp_path / "a,b")


def test_half_are_answers_to_its_own_questions_and_a_stopped_call_goes_on(
    model, tmp_path, monkeypatch
):
    """Each file is drawn from prompts that end where a document, a turn or an answer begins."""
    for name, length in (("LONGEST", 12), ("QUESTION", 6)):
        monkeypatch.setattr(own_text, name, length)
    monkeypatch.setattr(answers, "_CALLS", 1)
    own, asked = OwnText(tmp_path, 12, "python:flax"), []
    real = type(model).generate

    def generate(self, prompts, *args, **kwargs):
        asked.append(list(map(tuple, prompts)))
        return real(self, prompts, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    own.write(model.checkpoint, lambda: model, batch_size=4)
    files = [tmp_path / f"own-{x}.jsonl" for x in ("documents", "questions", "answers")]
    texts = [file.read_text() for file in files]
    assert own.name_sources(model.checkpoint.tokenizer) == f"{files[0]},{files[2]},python:flax"
    said = [[json.loads(line) for line in text.splitlines()] for text in texts]
    documents, questions, chats = said
    assert 3 <= len(questions) <= 6 and 3 <= len(documents) <= 6
    mine = [x["text"].strip() for x in questions]
    assert {chat["messages"][0]["content"] for chat in chats} <= set(mine)
    assert [m["role"] for chat in chats for m in chat["messages"]] == ["user", "assistant"] * len(
        chats
    )
    tokenizer = model.checkpoint.tokenizer
    whole = Conversation(({"role": "user", "content": mine[0]},)).render(tokenizer)
    assert len({x["text"] for x in documents}) == len(documents)  # drawn, each by its number
    turn = tokenizer.decode(list(asked[0][0]))
    assert whole.startswith(turn) and mine[0] not in turn and turn.endswith("user\n")
    assert asked[-1][0] == (tokenizer.end_of_text_id,) == asked[-2][0]
    # Killed after the first group of the last part: the others are not written again.
    for file in files:
        file.with_name(f"{file.name}.tried.json").unlink()
        file.unlink()
    kept = answers.WrittenAnswers.write
    count = []

    def stop(self, *args, **kwargs):
        if len(count) == 4:
            raise KeyboardInterrupt
        count.append(1)
        kept(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(answers.WrittenAnswers, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            own.write(model.checkpoint, lambda: model, batch_size=4)
    asked.clear()
    own.write(model.checkpoint, lambda: model, batch_size=4)
    assert [file.read_text() for file in files] == texts
    assert len(asked) == 2  # documents alone
    own.write(model.checkpoint, lambda: pytest.fail("loaded again"), batch_size=4)
    with pytest.raises(UserError, match="made with other own; expected the same"):
        own._replace(texts=8).write(model.checkpoint, lambda: model, batch_size=4)


def test_without_a_template_all_texts_begin_a_document(model, tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "LONGEST", 12)
    tokenizer = dataclasses.replace(model.checkpoint.tokenizer, chat_template=None)
    monkeypatch.setitem(vars(model.checkpoint), "tokenizer", tokenizer)
    own = OwnText(tmp_path, 4, "")
    own.write(model.checkpoint, lambda: model, batch_size=4)
    (file,) = tmp_path.glob("own-*.jsonl")
    assert own.name_sources(tokenizer) == str(file) and len(file.read_text().splitlines()) > 1
