"""A look at what trains: counts, rows, the teacher's view. What kdjax stores, and its removal."""

import dataclasses
import json
import os

import pytest

from kdjax.commands import cache, data, plan
from kdjax.commands.cache import Store, manage
from kdjax.data.rows import RowSettings, prepare_rows
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models.tokenizer import from_gguf
from kdjax.training import inputs

CONFIG = """
from kdjax import Config

def get_config():
    config = Config()
    config.student.path, config.data.train = {student!r}, {train!r}
    config.data.cache_dir, config.data.seq_len = {rows!r}, 31
    config.data.heldout_fraction = 0.3
    config.train.steps, config.train.batch_size = 5, 2
    config.loss.alpha, config.optim.warmup_steps = 1.0, 0
    return config
"""


@pytest.fixture
def config(models, tmp_path):
    """A config's file, of a folder with records, a text, and what is neither."""
    folder = tmp_path / "text"
    folder.mkdir()
    pairs = [{"prompt": f"{i}?", "completion": f" [{i}]!"} for i in range(20)]
    pairs += [{"prompt": "x" * 99, "completion": "y"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "b.py").write_text("x = 1\n" * 20)
    (folder / "c.py").write_text("")
    (folder / "d.png").write_bytes(b"\x89")
    paths = {"student": str(models / "student.gguf"), "train": str(folder)}
    (tmp_path / "own.py").write_text(CONFIG.format(rows=str(tmp_path / "rows"), **paths))
    return tmp_path / "own.py"


def test_counts_and_rows_are_shown(config, capsys):
    assert data.main([str(config), "--rows=2"]) == 0
    said = capsys.readouterr().out
    train, heldout, left_out, epochs, *rows = said.splitlines()
    assert train.startswith("text, train: ") and "complete records" in train
    documents = [int(line.partition(" tokens of ")[2].split()[0]) for line in (train, heldout)]
    assert sum(documents) == 21  # 20 short records and a text
    assert "1 documents without text" in left_out and "1 documents longer than a row" in left_out
    assert "1 files (.png 1): its suffix is none of text or records" in left_out
    number = int(train.partition(": ")[2].split()[0])
    assert f"the run reads {10 / number:.2f} epochs of its {number} training rows" in epochs
    shown = [line for line in rows if line.startswith("row ")]
    assert len(shown) == 2 and " of 32 tokens" in shown[0]


def test_settings_may_have_spaces(config, tmp_path, capsys):
    (tmp_path / "text").rename(tmp_path / "my text")
    assert data.main([f"--config={config}", f"--config.data.train={tmp_path}/my text"]) == 0
    assert " tokens of " in capsys.readouterr().out


def test_a_row_shows_what_carries_loss(config, models, tmp_path):
    tokenizer = from_gguf(dict(open_table(models / "student.gguf").metadata), "x")
    settings = RowSettings(
        f"{tmp_path}/text/a.jsonl", "", tokenizer, 31, 0.3, tokenizer.eos_id, max_segments=32
    )
    rows = prepare_rows(settings, tmp_path / "made")
    plain = data.draw_row(rows.train, 0, tokenizer, plain=True).plain
    coloured = data.draw_row(rows.train, 0, tokenizer, plain=False)
    lines = plain.splitlines()[1:]
    end = tokenizer.tokens[tokenizer.eos_id]
    for line in lines:
        number = line.partition("] ")[2].partition("?")[0]
        assert line.endswith(f"{number}?⟦ [{number}]!{end}⟧")
    green = [coloured.plain[s.start : s.end] for s in coloured.spans if s.style == "bold green"]
    assert "".join(f"⟦{text}⟧" for text in green) == "".join(
        line[line.index("⟦") :] for line in lines
    )


def test_the_teacher_s_view_is_shown_where_it_differs(config, models, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    tokenizer = from_gguf(dict(open_table(models / "student.gguf").metadata), "x")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ours = dataclasses.replace(tokenizer, chat_template=template)
    theirs = dataclasses.replace(tokenizer, chat_template=f"system!{template}")
    run = inputs.Config()
    run.data.train = str(tmp_path / "chat.jsonl")
    ((place, mine, other),) = data.find_differing(run, ours, theirs)
    assert place.endswith("chat.jsonl:1") and other == f"system!{mine}"
    drawn = data.draw_difference(mine, other)
    assert [drawn.plain[s.start : s.end] for s in drawn.spans if s.style] == ["system!"]
    assert not [*data.find_differing(run, ours, ours)]


def test_a_plan_shows_rows_too(config, monkeypatch):
    shown = []
    monkeypatch.setattr(plan, "plan_run", lambda run, machine: 7)
    monkeypatch.setattr(plan, "show_run", lambda run, rows: shown.append(rows))
    assert plan.main([f"--config={config}", "--rows=3"]) == 7 and shown == [3]
    assert plan.main([f"--config={config}"]) == 7 and shown == [3]
    with pytest.raises(UserError, match=r"--rows=-1 must be 0 or more"):
        data.main.__wrapped__([str(config), "--rows=-1"])


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """Folders of stores, with what is kdjax's and what is not."""
    key = "0" * 64
    for name in ("rows", "headers", "programs"):
        (tmp_path / name).mkdir()
        folder = dict(cache.STORES[name]._asdict(), folder=tmp_path / name)
        monkeypatch.setitem(cache.STORES, name, Store(**folder))
    (tmp_path / "rows" / key / "train").mkdir(parents=True)
    (tmp_path / "rows" / key / "train" / "tokens.bin").write_bytes(bytes(2_000_000))
    os.mkdir(tmp_path / "rows" / ".making-abc")
    (tmp_path / "rows" / "mine.txt").write_text("mine")
    (tmp_path / "headers" / f"{key}-33554432").write_bytes(b"x")
    (tmp_path / "programs" / "jit_step").write_bytes(bytes(8_000_000))
    return tmp_path


def left(stores):
    return sorted(str(p.relative_to(stores)) for p in stores.rglob("*") if not p.is_dir())


def test_stores_are_listed_and_removed_when_it_is_confirmed(stores, capsys):
    before = left(stores)
    assert manage(["--list"]) == 0
    said = capsys.readouterr().out
    assert f"rows         0.00 GB  {stores}/rows: packed rows of texts, 1\n" in said
    assert f"programs     0.01 GB  {stores}/programs: compiled programs, 1\n" in said
    assert manage(["--clear=rows,programs"]) == 0
    said = capsys.readouterr().out
    assert "rows: 1 to remove, 0.00 GB" in said and left(stores) == before
    assert "To remove it: kdjax cache --clear=rows,programs --yes" in said
    assert manage(["--clear=rows", "--yes"]) == 0
    assert "rows: 1 removed" in capsys.readouterr().out
    assert left(stores) == sorted(set(before) - {f"rows/{'0' * 64}/train/tokens.bin"})
    assert (stores / "rows" / ".making-abc").is_dir()
    assert cache.main(["--clear", "--yes"]) == 0  # all of them
    assert left(stores) == ["rows/mine.txt"]
    with pytest.raises(UserError, match=r"--clear=row: found 'row'; expected some of rows,headers"):
        manage(["--clear=row"])
    with pytest.raises(SystemExit):
        cache.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {flag}" in said for flag in ("--out", "--list", "--clear [NAMES]", "--yes"))
    with pytest.raises(UserError, match="--yes is for --clear"):
        manage(["--list", "--yes"])


def test_a_cache_is_refused_in_a_files_place_before_anything_is_read(tmp_path, monkeypatch, capsys):
    file = tmp_path / "cache"
    file.write_text("mine")
    monkeypatch.setattr(cache, "started", lambda *_, **__: pytest.fail("started"))
    assert cache.main(["--config=demo", f"--out={file}"]) == 2
    assert f"{file} is no folder; expected one" in capsys.readouterr().err
    assert file.read_text() == "mine"
