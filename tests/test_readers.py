"""Forms of files: each holds the same records; what is neither text nor record is refused."""

import csv
import gzip
import importlib
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdjax.data import readers, rows, sources
from kdjax.data.fields import NAMED, Fields
from kdjax.data.readers import read_records
from kdjax.data.sources import find_files, survey_files
from kdjax.data.text import documents
from kdjax.errors import MissingFileError, UserError
from kdjax.evaluation import drafting, heldout
from kdjax.evaluation.answers import list_prompts
from kdjax.formats import files
from kdjax.models.tokenizer import load_tokenizer

TURNS = [
    [{"role": "user", "content": "größe?"}, {"role": "assistant", "content": "\u2028 2\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": 'b, "c"'}],
    [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}],
]
RECORDS = [{"messages": turns} for turns in TURNS]
SHAREGPT = {"from": {"user": "human", "assistant": "gpt"}}
ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3", "id": 1},
    {"instruction": "Say a.", "input": "", "output": "a", "id": 2},
]


def lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def stream(records):
    """Bytes of an Arrow stream, which `datasets` saves."""
    table, sink = pa.Table.from_pylist(records), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def file_of(records):
    table, sink = pa.Table.from_pylist(records), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def parquet(records):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink)
    return sink.getvalue().to_pybytes()


BOM = b"\xef\xbb\xbf"
FORMS = {
    "a.jsonl": lines(RECORDS),
    "b.ndjson": BOM + lines(RECORDS).replace(b"\n", b"\r\n\r\n"),
    "array.json": json.dumps(RECORDS, indent=1).encode(),
    "lines.json": BOM + lines(RECORDS),
    "a.parquet": parquet(RECORDS),
    "stream.arrow": stream(RECORDS),
    "file.arrow": file_of(RECORDS),
    "a.jsonl.gz": gzip.compress(lines(RECORDS)),
    "A.JSONL.ZST": zstd(lines(RECORDS)),
    "a.json.zst": zstd(json.dumps(RECORDS).encode()),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same_records(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FORMS[name])
    places, found = zip(*read_records([path]), strict=True)
    assert list(found) == RECORDS
    assert all(place.startswith(f"{path}:") and place[-1].isdigit() for place in places)
    assert find_files(str(tmp_path)) == [path]  # and a folder's walk finds it


def test_separated_values_are_records_by_named_columns(tmp_path):
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["id", "prompt", "completion"])
            writer.writerows([[1, "a, b", 'line\n"two"'], [2, "", "c"]])
        assert [record for _, record in read_records([tmp_path / name])] == [
            {"id": "1", "prompt": "a, b", "completion": 'line\n"two"'},
            {"id": "2", "prompt": "", "completion": "c"},
        ]
    (tmp_path / "bad.csv").write_text("prompt,completion\na,b\nc,d,e\n")
    with pytest.raises(UserError, match=r"bad\.csv:3: found 3 values in record 2; expected 2"):
        list(read_records([tmp_path / "bad.csv"]))
    (tmp_path / "open.csv").write_text('prompt,completion\na,"b\n')
    with pytest.raises(UserError, match=r"open\.csv:2: found a row that is not separated values"):
        list(read_records([tmp_path / "open.csv"]))


def test_an_object_is_a_text_unless_it_is_a_record(tmp_path, tokenizer, caplog):
    (tmp_path / "package.json").write_text('{\n "name": "x"\n}\n')
    (tmp_path / "comments.json").write_text('{ // a comment\n "a": 1}')
    (tmp_path / "one.json").write_text(json.dumps(RECORDS[0], indent=1))
    found = [record for _, record in read_records(sorted(tmp_path.iterdir()))]
    assert found[0] == {"text": '{ // a comment\n "a": 1}'}
    assert found[1:] == [RECORDS[0], {"text": '{\n "name": "x"\n}\n'}]
    list(documents(sorted(tmp_path.glob("[cp]*.json")), tokenizer))
    assert f"{tmp_path}/package.json: JSON that holds no records, read as text" in caplog.text


def test_notebooks_are_their_cells(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "x = 1\n", "outputs": [{"text": "SECRET"}]},
        {"cell_type": "code", "source": []},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    old = [{"cell_type": "code", "input": ["y = 2"]}]
    (tmp_path / "b.ipynb").write_text(json.dumps({"worksheets": [{"cells": old}]}))
    found = [record for _, record in read_records(find_files(str(tmp_path)))]
    assert found == [{"text": "# Title\ntext\n\nx = 1"}, {"text": "y = 2"}]
    (tmp_path / "c.ipynb").write_text("{}")
    with pytest.raises(UserError, match=r"c\.ipynb: found JSON that is no notebook"):
        list(read_records([tmp_path / "c.ipynb"]))


def test_columns_have_other_names(tmp_path):
    turns = [
        [{"from": SHAREGPT["from"][m["role"]], "value": m["content"]} for m in one] for one in TURNS
    ]
    shared = [{"id": i, "conversations": one} for i, one in enumerate(turns)]
    shared[0]["system"] = "be brief"
    fields = Fields.parse("messages=conversations,role=from,content=value")
    (tmp_path / "a.json").write_bytes(json.dumps(shared).encode())
    (tmp_path / "b.parquet").write_bytes(parquet(shared))
    for name in ("a.json", "b.parquet"):
        found = [record for _, record in read_records([tmp_path / name], fields)]
        assert [record["messages"] for record in found] == TURNS
    with_system = Fields.parse("messages=conversations,role=from,content=value,system=system")
    first, second, _ = (r for _, r in read_records([tmp_path / "b.parquet"], with_system))
    assert first["messages"][0] == {"role": "system", "content": "be brief"}
    assert second["messages"] == TURNS[1]
    (tmp_path / "alpaca.json").write_text(json.dumps(ALPACA))
    alpaca = Fields.parse("user=instruction+input,assistant=output")
    found = [record for _, record in read_records([tmp_path / "alpaca.json"], alpaca)]
    said = [("Add.\n1 2", "3"), ("Say a.", "a")]
    assert [tuple(m["content"] for m in one["messages"]) for one in found] == said
    # A file whose records have the names that kdjax reads stays as it is.
    (tmp_path / "own.jsonl").write_bytes(lines(RECORDS))
    assert [r for _, r in read_records([tmp_path / "own.jsonl"], alpaca)] == RECORDS


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "a", "input": ""}, r"a\.jsonl:2: found nothing as output; expected a te"),
        ({"instruction": 3, "output": "a"}, r"a\.jsonl:2: found 3 as instruction; expected a text"),
    ],
)
def test_a_named_column_that_is_missing_is_named(record, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([ALPACA[0], record]))
    fields = Fields.parse("user=instruction+input,assistant=output")
    with pytest.raises(UserError, match=message):
        list(read_records([tmp_path / "a.jsonl"], fields))


def test_commands_name_columns_too(tmp_path, tokenizer):
    """`--fields` of evaluate, imatrix, answers and draft: what trains is what is measured."""
    (tmp_path / "a.jsonl").write_bytes(lines([{"body": "one two three " * i} for i in (4, 5)]))
    body, path = Fields.parse("text=body"), str(tmp_path / "a.jsonl")
    read = heldout.read_text(path, tokenizer, rows=4, seq_len=64, fields=body)
    assert tokenizer.decode(read.rows.tokens[0].tolist()).startswith("one two three one")
    assert len(drafting.choose_prompts(path, tokenizer, count=2, most=99, fields=body)) == 2
    assert len(list_prompts(path, tokenizer, 99, body)) == 2
    for read in (
        lambda: heldout.read_text(path, tokenizer, rows=4, seq_len=64),
        lambda: drafting.choose_prompts(path, tokenizer, count=2, most=99),
        lambda: list_prompts(path, tokenizer, 99),
    ):
        with pytest.raises(UserError, match=r"a.jsonl:1: "):
            read()


@pytest.mark.parametrize("command", ["answers", "draft", "evaluate", "imatrix", "shrink"])
def test_a_wrong_name_of_a_column_is_refused_before_a_model_is_opened(command, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(ALPACA))
    flag = {"answers": "--prompts", "draft": "--data", "shrink": "--text"}.get(command, "--data")
    arguments = ["none.gguf", f"{flag}={tmp_path}/a.jsonl", "--fields=texts=a"]
    arguments += ["--bits=3"] * (command == "shrink")
    if command != "evaluate":
        arguments.append(f"--out={tmp_path}/out.gguf")
    main = importlib.import_module(f"kdjax.commands.{command}").main
    assert main(arguments) == 2
    assert "found 'texts=a'; expected NAME=COLUMN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user=a", r"found user; expected text, messages, user and assistant"),
        ("texts=a", r"found 'texts=a'; expected NAME=COLUMN.*Did you mean text\?"),
        ("text=a,text=b", r"found 'text=b'; expected NAME=COLUMN, each NAME once"),
        ("text", r"found 'text'; expected NAME=COLUMN"),
    ],
)
def test_wrong_fields_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        Fields.parse(text)


def test_unknown_columns_say_what_names_them(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(lines(ALPACA))
    (tmp_path / "a.csv").write_text("question,answer\na,b\n")
    with pytest.raises(UserError, match=r"a.jsonl:1: .*Set data.fields=user=instruction\+input,as"):
        list(documents([tmp_path / "a.jsonl"], tokenizer))
    (tmp_path / "b.jsonl").write_bytes(lines([{"prompt": "a", "response": "b"}]))
    with pytest.raises(UserError, match=r"b.jsonl:1: .*Set data.fields=user=prompt,assistant=resp"):
        list(documents([tmp_path / "b.jsonl"], tokenizer))
    with pytest.raises(UserError, match=r"a.csv: .*Set data.fields=user=question,assistant=answer"):
        list(documents([tmp_path / "a.csv"], tokenizer))


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models / "student.gguf")


@pytest.fixture
def clone(tmp_path):
    """A local clone of a Hub data set."""
    (tmp_path / "clone" / "data").mkdir(parents=True)
    (tmp_path / "clone" / ".git").mkdir()
    (tmp_path / "clone" / ".git" / "x.py").write_text("x")
    (tmp_path / "clone" / "README.md").write_text("---\nlicense: mit\nconfigs:\n- a\n---\n# Card")
    (tmp_path / "clone" / "LICENSE.txt").write_text("MIT")
    for split in ("train", "test", "validation"):
        records = [{"text": f"{split} {i}"} for i in range(3)]
        (tmp_path / "clone" / "data" / f"{split}-00000-of-00001.parquet").write_bytes(
            parquet(records)
        )
    return tmp_path / "clone"


def test_a_clone_of_a_data_set_reads_its_training_records(clone, caplog):
    caplog.set_level(logging.INFO)
    assert [path.name for path in find_files(str(clone))] == ["train-00000-of-00001.parquet"]
    assert "README.md: the folder is a data set, of which records alone are read" in caplog.text
    assert "name this one to read it, too" in caplog.text
    assert len(find_files(f"{clone}/data/test*")) == 1  # named
    counts = survey_files(str(clone)).count()
    assert counts == {
        sources.BESIDE_TABLES: {".md": 1, ".txt": 1},
        sources.OTHER_SPLIT: {".parquet": 2},
    }


def test_folders_that_datasets_saved_are_read(tmp_path):
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "data-00000-of-00001.arrow").write_bytes(stream([{"text": split}]))
        (folder / "dataset_info.json").write_text('{"features": {}}')
        (folder / "state.json").write_text('{"_data_files": []}')
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for folder, split in (("saved", "train"), ("saved/test", "test")):
        found = [record for _, record in read_records(find_files(f"{tmp_path}/{folder}"))]
        assert found == [{"text": split}]


def test_what_datasets_saves_is_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "a"))
    assert [record for _, record in read_records(find_files(f"{tmp_path}/a"))] == RECORDS


def test_what_a_folder_holds_beside_text_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "fixture.json").write_text('[{"id": 1, "size": 2}]')
    (tmp_path / "sales.csv").write_text("date,amount\n1,2\n")
    for name in ("a.png", "b.png", "Makefile"):
        (tmp_path / name).write_bytes(b"\x89")
    assert [path.name for path in find_files(str(tmp_path))] == ["a.py"]
    left_out = survey_files(str(tmp_path)).count()
    assert left_out[sources.OTHER_SUFFIX] == {".png": 2, "Makefile": 1}
    said = "fixture.json: records of id, size, which data.fields (--fields) may name, left out"
    assert said in caplog.text
    assert "sales.csv: records of date, amount" in caplog.text
    # Named itself, it is refused: nothing of it can be read.
    with pytest.raises(UserError, match=r"sales\.csv: expected columns of .*found date, amount"):
        list(read_records(find_files(f"{tmp_path}/*.csv")))
    (tmp_path / "a.py").unlink()
    with pytest.raises(MissingFileError, match="no file found that is read"):
        find_files(str(tmp_path))
    fields = Fields.parse("user=date,assistant=amount")
    assert [path.name for path in find_files(str(tmp_path), fields)] == ["sales.csv"]


OTHERS = {
    "a.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid x", r"git lfs pull"),
    "a.parquet": (b"version https://git-lfs.github.com/spec/v1\noid x", r"pointer of Git LFS"),
    "a.pdf": (b"%PDF-1.4\n", r"found a PDF file; expected text or records\. Write its text"),
    "a.docx": (b"PK\x03\x04....", r"found a ZIP archive"),
    "a.txt": ("x = 1".encode("utf-16"), r"found text in UTF-16; .* Convert it to UTF-8"),
    "a.bin": (parquet([{"text": "a"}]), r"found a Parquet file; .* Name it \.parquet"),
    "a.tar": (b"name".ljust(257, b"\0") + b"ustar".ljust(255, b"\0"), r"found a tar archive"),
    "a.tgz": (gzip.compress(b"n".ljust(257, b"\0") + b"ustar".ljust(255, b"\0")), r"a tar archive"),
    "cut.jsonl.gz": (gzip.compress(lines(RECORDS * 99))[:-40], r"that cannot be unpacked"),
    "b.jsonl.zst": (zstd(lines(RECORDS * 99))[:-40], r"b\.jsonl\.zst"),
    "a.arrow": (b"nothing", r"not a readable Arrow file"),
    "b.json": (b'[{"text": "a"}, {"text": ', r"b\.json: not JSON \(.*column 26\)"),
    "c.json": (b'{"text": "a"}\n{"text": ', r"c\.json:2: not JSON"),
    "d.json": (b'[{"text": "a"}, 3]', r"d\.json:2: expected an object"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_neither_text_nor_record_is_refused(name, tmp_path, tokenizer):
    data, message = OTHERS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        list(documents([tmp_path / name], tokenizer))


def test_a_small_packed_file_takes_little_memory(tmp_path, monkeypatch):
    for module in (files, readers):
        monkeypatch.setattr(module, "MOST_UNPACKED", 1 << 16)
    bomb = gzip.compress(b" " * (1 << 20))
    (tmp_path / "a.txt.gz").write_bytes(bomb)
    with pytest.raises(UserError, match=r"found more than 0 MiB in a packed file"):
        list(read_records([tmp_path / "a.txt.gz"]))
    (tmp_path / "a.jsonl.gz").write_bytes(bomb)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz:1: found a line of more than"):
        list(read_records([tmp_path / "a.jsonl.gz"]))


def test_arrow_needs_a_package(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *others, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *others, **more)

    for name in ("stream.arrow", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(FORMS[name.replace("a.jsonl.zst", "A.JSONL.ZST")])
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", without)
            with pytest.raises(UserError, match=r"needs pyarrow. .*pip install 'kdjax\[parquet\]'"):
                list(read_records([tmp_path / name]))


def test_runs_that_began_with_json_as_text_go_on(tmp_path, tokenizer):
    """Keys of text and of .jsonl alone stay; other forms have new ones, and begun runs theirs."""
    settings = rows.RowSettings(
        str(tmp_path / "t"), "", tokenizer, 7, 0.5, tokenizer.eos_id, max_segments=32
    )
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.jsonl").write_bytes(lines(RECORDS))
    assert len(rows._list_keys(settings, settings.find_files())) == 2
    (tmp_path / "t" / "b.json").write_bytes(lines(RECORDS))
    cut, whole, now = rows._list_keys(settings, settings.find_files())
    assert rows.rows_key(settings) == rows.rows_key(settings, begun="another") == now
    assert rows.rows_key(settings, begun=whole) == whole
    assert rows.rows_key(settings, begun=cut) == cut
    (tmp_path / "t" / "b.json").rename(tmp_path / "t" / "b.txt")
    (tmp_path / "t" / "b.txt").write_bytes(b"plain")
    plain = rows.rows_key(settings)
    (tmp_path / "t" / "b.txt").write_bytes(BOM + b"plain")
    assert len(rows._list_keys(settings, settings.find_files())) == 3 and plain != now
    assert Fields.parse("") is NAMED
