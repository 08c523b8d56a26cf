"""`hf:` paths against a Hub on loopback: what is fetched, resumed, refused and said."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import yaml
from conftest import make_tiny_config
from fake_hub import COMMIT, FakeHub
from huggingface_hub import constants, file_download
from quick import cases

from kdjax import hub
from kdjax.commands import cli
from kdjax.config import Config
from kdjax.data.sources import find_files
from kdjax.device import runtime
from kdjax.errors import MissingFileError, UserError, WriteError
from kdjax.export import export_hf, push_to_hub
from kdjax.models.checkpoint import ModelArgument, open_checkpoint, run_sources
from kdjax.models.model import load
from kdjax.watch.receipt import _describe_sources
from kdjax.watch.verify import verify

BIG = bytes(range(256)) * 4000  # 1 MB
TEACHER, STUDENT = "hf:org/Teacher-GGUF/teacher.gguf", "hf:org/Student-GGUF/student.gguf"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A served Hub that huggingface_hub takes for its own, its cache under tmp_path."""
    folder = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "README.md": b"#",
        "onnx/config.json": b"{}",
    }
    served = FakeHub(
        {
            "org/Teacher-GGUF": {"teacher.gguf": BIG, "README.md": b"#"},
            "org/Student-GGUF": {"student.gguf": BIG[::-1], "other.gguf": b"other"},
            "org/Split": {f"big-0000{i}-of-00002.gguf": b"%d" % i for i in (1, 2)},
            "org/Folder": folder | {"model.safetensors": BIG, "consolidated.safetensors": BIG},
            "org/Inside": {
                f"sub/{name}": data
                for name, data in (folder | {"additional_chat_templates/a.jinja": b""}).items()
            },
            "datasets/org/text": {
                "README.md": b"#",
                "train/0.parquet": b"0",
                "train/1.parquet": b"1",
                "test.jsonl": b"{}",
            },
        }
    )
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with served.serving() as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # of 10 MB
        monkeypatch.setattr(hub, "HEADERS", tmp_path / "headers")
        monkeypatch.setattr(file_download.time, "sleep", lambda _: None)  # between retries
        huggingface_hub.close_session()
        yield served
        huggingface_hub.close_session()


@pytest.fixture
def said(caplog):
    """kdjax's own lines, as they are logged."""
    caplog.set_level(logging.INFO, "kdjax")
    return lambda: "\n".join(r.message for r in caplog.records if r.name == "kdjax")


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())


def config_of(teacher=TEACHER, student=STUDENT, train="python:optax", heldout="python:chex"):
    config = Config()
    config.teacher.path, config.student.path = teacher, student
    config.data.train, config.data.heldout = train, heldout
    return config


# --- what is fetched ----------------------------------------------------------------------------


def test_paths_become_files_and_the_receipt_has_their_commit(fake, said):
    text = "hf:datasets/org/text/train"
    asked = config_of(train=f"{text}, python:optax", heldout="hf:datasets/org/text/test.jsonl@v1")
    asked.data.tokenizer = "hf:org/Folder@main"
    config = hub.fetch_files(asked)
    assert asked.teacher.path == TEACHER  # the config that was given stays as it is
    assert Path(config.teacher.path).read_bytes() == BIG
    assert Path(config.student.path).read_bytes() == BIG[::-1]
    assert names(config.data.tokenizer) == ["config.json", "tokenizer.json"]  # no weights
    patterns, optax = config.data.train.rsplit(",", 1)
    assert [Path(p).read_bytes() for p in patterns.split(",")] == [b"0", b"1"]
    assert optax == "python:optax" and len(find_files(config.data.train)) > 10
    assert [p.name for p in find_files(config.data.heldout)] == ["test.jsonl"]
    sources = _describe_sources(config)
    assert sources["teacher.path"] == [f"{TEACHER}@{COMMIT}"]
    assert sources["data.tokenizer"] == [f"hf:org/Folder@{COMMIT}"]
    assert sources["data.train"][:2] == [f"{text}/{i}.parquet@{COMMIT}" for i in (0, 1)]
    assert sources["data.heldout"] == [f"hf:datasets/org/text/test.jsonl@{COMMIT}"]
    assert f"{TEACHER}, {STUDENT}" in said() and "2.05 MB to download, to " in said()
    assert f"{TEACHER}: commit {COMMIT}" in said()
    # Again, and by the names in the sources: nothing is downloaded.
    before = fake.downloads()
    assert hub.fetch_files(asked) == config == hub.fetch_files(config)
    assert hub.fetch_path(sources["teacher.path"][0]) == config.teacher.path
    assert fake.downloads() == before


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("hf:org/Folder", ["config.json", "model.safetensors", "tokenizer.json"]),
        ("hf:org/Folder@v1", ["config.json", "model.safetensors", "tokenizer.json"]),
        ("hf:org/Split/big-00001-of-00002.gguf", [f"big-0000{i}-of-00002.gguf" for i in (1, 2)]),
        (
            "hf:org/Folder/consolidated.safetensors",
            ["config.json", "consolidated.safetensors", "tokenizer.json"],
        ),
    ],
)
def test_what_is_taken_of_a_repository(fake, tmp_path, path, files):
    local = Path(hub.fetch_path(path))
    assert (
        names(tmp_path / "cache" / local.parts[len(tmp_path.parts) + 1] / "snapshots" / COMMIT)
        == files
    )
    assert local.exists() and (local.is_dir() or local.name == path.rpartition("/")[2])
    assert hub.origin(local) == path.partition("@")[0] + f"@{COMMIT}"


def test_what_is_taken_of_folders_and_globs(fake):
    assert names(hub.fetch_path("hf:org/Inside/sub", hub.TOKENIZER)) == [
        "additional_chat_templates/a.jinja",
        "config.json",
        "tokenizer.json",
    ]
    for pattern, files in {
        "hf:datasets/org/text": ["0.parquet", "1.parquet"],  # the split train
        "hf:datasets/org/text/test.jsonl": ["test.jsonl"],
        "hf:datasets/org/text/train": ["0.parquet", "1.parquet"],
        "hf:datasets/org/text/tr*/1.*": ["1.parquet"],
    }.items():
        assert [Path(p).name for p in hub.fetch_path(pattern, hub.TEXT).split(",")] == files


def test_a_student_of_shapes_alone_needs_no_weights(fake):
    config = config_of(student="hf:org/Folder")
    config.student.init = "random"
    assert names(hub.fetch_files(config).student.path) == ["config.json", "tokenizer.json"]


def test_a_local_file_of_the_name_comes_first(fake, tmp_path, said):
    (tmp_path / "models" / "Folder").mkdir(parents=True)
    (tmp_path / "models" / "teacher.gguf").write_bytes(b"mine")
    config = hub.fetch_files(config_of(student="hf:org/Folder"))
    assert config.teacher.path == "models/teacher.gguf"
    assert config.student.path == "models/Folder"
    assert f"models/teacher.gguf is used for {TEACHER}" in said() and not fake.asked
    # Whose revision it is, nobody knows.
    assert hub.fetch_path(f"{TEACHER}@v1") != config.teacher.path


def test_every_repository_is_asked_before_the_first_download(fake):
    with pytest.raises(MissingFileError, match="has no model org/Missing"):
        hub.fetch_files(config_of(student="hf:org/Missing/x.gguf"))
    assert not fake.downloads()


def test_models_and_text_open_by_their_names(fake, models):
    fake.repositories["org/Teacher-GGUF"]["teacher.gguf"] = (models / "teacher.gguf").read_bytes()
    assert ModelArgument.parse(f"{TEACHER}@v1@packed:float32") == ModelArgument(
        f"{TEACHER}@v1", "packed", "float32"
    )
    assert ModelArgument.parse(f"{TEACHER}@v1") == ModelArgument(f"{TEACHER}@v1")
    checkpoint = open_checkpoint(f"{TEACHER}@v1")
    assert checkpoint.sha256 == hashlib.sha256((models / "teacher.gguf").read_bytes()).hexdigest()
    assert [p.name for p in find_files("hf:datasets/org/text")] == [
        "0.parquet",
        "1.parquet",
    ]


def test_a_run_s_student_is_fetched_again_when_the_cache_lost_it(fake, tmp_path):
    config = hub.fetch_files(config_of())
    record = {"config": {"student": {"path": config.student.path}}, "cwd": str(tmp_path)}
    (tmp_path / "receipt.json").write_text(json.dumps(record))
    Path(config.student.path).unlink()
    assert run_sources(tmp_path) == (config.student.path, "")
    assert Path(config.student.path).read_bytes() == BIG[::-1]


# --- downloads that are cut, damaged, or have no room -------------------------------------------


def test_a_cut_download_leaves_nothing_but_whole_files(fake, tmp_path):
    """The same command brings the others: no file that arrived is asked for again."""
    fake.cut = {"student.gguf": 300_000}
    with pytest.raises(MissingFileError, match=r"(?s)does not answer .*the same command downloads"):
        hub.fetch_files(config_of())
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    fake.cut, fake.asked[:] = {}, []
    config = hub.fetch_files(config_of())
    assert Path(config.teacher.path).read_bytes() == BIG
    assert Path(config.student.path).read_bytes() == BIG[::-1]
    assert fake.downloads() == [("student.gguf", 0)]


def test_damaged_bytes_are_not_kept(fake, tmp_path):
    fake.damaged = {"teacher.gguf"}
    with pytest.raises(MissingFileError, match=r"found SHA-256 \w+ of the downloaded teacher.gguf"):
        hub.fetch_path(TEACHER)
    assert not [path for path in (tmp_path / "cache").rglob("blobs/*")]
    fake.damaged = set()
    assert Path(hub.fetch_path(TEACHER)).read_bytes() == BIG


def test_a_full_disk_is_found_before_the_first_byte(fake, monkeypatch):
    usage = hub.shutil.disk_usage(".")._replace(free=1_500_000)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WriteError, match=r"2.05 MB to download and 1.50 MB free in .*HF_HOME"):
        hub.fetch_files(config_of())
    assert not fake.downloads()
    assert hub.fetch_path(TEACHER)  # one of them has room


def test_what_the_cache_has_of_another_commit_needs_no_room(fake, tmp_path, monkeypatch, said):
    """A commit that changed other files alone: neither bytes nor headers are asked for."""
    first = Path(hub.fetch_path(TEACHER))
    shutil.rmtree(first.parent)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: mock.Mock(free=0))
    monkeypatch.setattr(hub, "HEADER", 1000)
    before = fake.downloads()
    config = config_of(student=TEACHER)
    plan = hub.fetch_headers(config, tmp_path / "plan")
    assert Path(plan.teacher.path).read_bytes() == BIG
    shutil.rmtree(first.parent)
    assert hub.fetch_files(config).teacher.path == str(first) and first.read_bytes() == BIG
    assert "0.00 MB to download" in said() and fake.downloads() == before


def test_a_disk_that_fills_up_is_one_message(fake, tmp_path, monkeypatch):
    """Somebody else took the room: the write of the bytes after 300,000 fails."""
    real = file_download.http_get

    def fill(url, file, **options):
        class Full:
            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, data):
                if file.tell() + len(data) > 300_000:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return file.write(data)

        return real(url, Full(), **options)

    monkeypatch.setattr(file_download, "http_get", fill)
    with pytest.raises(WriteError, match=r"found a full disk and .* .*downloads the others"):
        hub.fetch_path(TEACHER)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    monkeypatch.setattr(file_download, "http_get", real)
    assert Path(hub.fetch_path(TEACHER)).read_bytes() == BIG


# --- what the Hub refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf:org/Missing/x.gguf", r"has no model org/Missing, or it is private and no token opens"),
        (
            "hf:org/Teacher-GGUF",
            r"GGUF files and no Transformers folder; .*GGUF/FILE: teacher.gguf",
        ),
        ("hf:org/Teacher-GGUF/teachr.gguf", r"found no teachr.gguf .* Did you mean teacher.gguf\?"),
        ("hf:org/Inside", r"found no model\*.safetensors in org/Inside"),
        (f"{TEACHER}@v9", r"org/Teacher-GGUF has no revision v9"),
        ("hf:org", r"hf:org: expected hf:ORG/REPO\[/FILE\]"),
        ("hf:datasets/org/text", r"expected hf:ORG/REPO"),
    ],
)
def test_what_is_not_there_is_named(fake, path, message):
    with pytest.raises(UserError, match=message):
        hub.fetch_path(path)
    assert not fake.downloads()


def test_text_that_is_not_there_is_named(fake):
    with pytest.raises(UserError, match=r"expected hf:datasets/ORG/REPO"):
        hub.fetch_path(TEACHER, hub.TEXT)
    with pytest.raises(UserError, match=r"found no train/9.parquet .* Did you mean train/"):
        hub.fetch_path("hf:datasets/org/text/train/9.parquet", hub.TEXT)
    with pytest.raises(UserError, match=r"has no dataset org/none"):
        hub.fetch_path("hf:datasets/org/none", hub.TEXT)


def test_a_gated_repository_is_found_before_the_first_download(fake, monkeypatch):
    fake.gated = {"org/Student-GGUF"}
    message = rf"org/Student-GGUF is gated, .* Request .*{constants.ENDPOINT}/org/"
    with pytest.raises(MissingFileError, match=message):
        hub.fetch_files(config_of())
    assert not fake.downloads()
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(MissingFileError, match=r"is gated, and the token that was found opens it"):
        hub.fetch_files(config_of())


@pytest.mark.parametrize("how", cases("gone", "offline", slow=["broken"]))
def test_without_the_hub_the_cache_serves_and_else_the_local_way_is_named(
    fake, monkeypatch, how, said
):
    config = config_of(train="hf:datasets/org/text/train")
    first = hub.fetch_files(config)
    if how == "gone":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif how == "broken":
        fake.broken = True
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch_files(config) == first
    assert f"{TEACHER}: the Hub does not answer; what the cache has is used" in said()
    config.student.path, config.data.train = "hf:org/Folder", "hf:datasets/org/text"
    with pytest.raises(MissingFileError) as raised:
        hub.fetch_files(config)
    folder, text = str(raised.value).split("\n")
    assert (
        "does not answer as the Hub does" in folder and "put it at models/Folder, or set" in folder
    )
    assert "does not answer as the Hub does" in text and "models/" not in text


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def config_file(fake, models, tmp_path, monkeypatch):
    """A config whose models and held-out text are this Hub's, to be run in an empty folder."""
    fake.repositories["org/Teacher-GGUF"]["teacher.gguf"] = (models / "teacher.gguf").read_bytes()
    fake.repositories["org/Student-GGUF"]["student.gguf"] = (models / "student.gguf").read_bytes()
    lines = "".join(json.dumps({"text": f"x = {i}\n" * 20}) + "\n" for i in range(40))
    fake.repositories["datasets/org/text"]["test.jsonl"] = lines.encode()
    config = make_tiny_config(models, tmp_path)
    config.teacher.path, config.student.path = TEACHER, STUDENT
    config.data.train = "python:tokenizers"
    config.data.heldout = "hf:datasets/org/text/test.jsonl"
    config.train.steps, config.eval.rows, config.eval.samples = 4, 8, 0
    classes = ", ".join(sorted(set(re.findall(r"\w+Config(?=\()", repr(config)))))
    made = f"from kdjax.config import Config, {classes}\n\n\ndef get_config():\n    return "
    (tmp_path / "config.py").write_text(f"{made}{config!r}\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return f"--config={tmp_path / 'config.py'}"


def test_a_plan_downloads_headers_alone(config_file, fake, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "HEADER", 50_000)
    monkeypatch.setattr(runtime, "mem_available", lambda: 8 * 10**9)  # plans print what is free
    assert cli.main(["plan", config_file]) == 0
    short = capsys.readouterr()
    assert "on each device, GB:" in short.out and "teacher.gguf: 0.05 MB of " in short.err
    assert sorted(fake.downloads()) == [("student.gguf", 0), ("teacher.gguf", 0)]  # and no text
    headers = list((tmp_path / "headers").iterdir())
    assert [header.stat().st_size for header in headers] == [50_000] * 2
    assert cli.main(["plan", config_file]) == 0 and len(fake.downloads()) == 2
    assert capsys.readouterr().out == short.out
    # The plan of whole files is the same.
    fake.asked.clear()
    assert hub.fetch_path(TEACHER) and hub.fetch_path(STUDENT)
    assert fake.downloads() == [("teacher.gguf", 0), ("student.gguf", 0)]
    assert cli.main(["plan", config_file]) == 0 and capsys.readouterr().out == short.out


@pytest.mark.parametrize("what", ["gone", "cut", "full", "full at the end"])
def test_a_header_that_cannot_be_read_is_one_message(config_file, fake, monkeypatch, capsys, what):
    monkeypatch.setattr(hub, "HEADER", 50_000)
    if what == "full":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(hub.tempfile, "NamedTemporaryFile", mock.Mock(side_effect=full))
    elif what == "full at the end":  # what was written is on its way to the disk until then
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(hub.os, "fsync", mock.Mock(side_effect=full))
    elif what == "cut":
        fake.cut = {"teacher.gguf": 30_000}
    else:
        fake.gated = {"org/Teacher-GGUF"}
    status, message = {
        "gone": (2, "org/Teacher-GGUF is gated"),
        "cut": (2, "does not answer as the Hub does"),
        "full": (74, "found a full disk"),
        "full at the end": (74, "found a full disk"),
    }[what]
    assert cli.main(["plan", config_file]) == status
    assert message in capsys.readouterr().err
    assert what == "gone" or not list(hub.HEADERS.iterdir())


def test_headers_of_a_folder_lie_beside_its_small_files(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "HEADER", 1000)
    folder = hub.fetch_headers(config_of(student="hf:org/Folder"), tmp_path / "plan").student
    assert names(folder.path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert Path(folder.path, "model.safetensors").read_bytes() == BIG[:1000]
    assert Path(folder.path, "config.json").read_bytes() == b"{}"


# --- what is looked at before gigabytes come ----------------------------------------------------


@pytest.mark.parametrize("command", ["train", "plan", "cache"])
def test_devices_are_looked_at_before_the_hub(config_file, fake, monkeypatch, capsys, command):
    """A bad variable, a platform that JAX cannot start on, and a GPU that it leaves idle."""
    command = [command, config_file] + ["--out=cached"] * (command == "cache")
    monkeypatch.setenv(runtime.MANAGED, "yes")
    assert cli.main(command) == 2 and "MANAGED_MEMORY='yes': must be" in capsys.readouterr().err
    monkeypatch.delenv(runtime.MANAGED)
    with monkeypatch.context() as patch:
        refuse = mock.Mock(side_effect=UserError("JAX cannot start there (no plugin)"))
        patch.setattr(runtime, "device_summary", refuse)
        assert cli.main(command) == 2 and "JAX cannot start there" in capsys.readouterr().err
    chosen = runtime.Runtime(runtime.DeviceMemory.DISCRETE, {}, ["x"], "off", gpus=1)
    monkeypatch.setattr(runtime, "configure", lambda **_: chosen)
    monkeypatch.setattr(runtime, "_asked_platforms", lambda: None)
    assert cli.main(command) == 2 and "JAX does not use them" in capsys.readouterr().err
    assert not fake.asked and not list(Path().iterdir())


@pytest.mark.parametrize("command", ["train", "cache"])
def test_a_run_that_cannot_be_is_refused_by_its_headers(
    config_file, fake, monkeypatch, capsys, command
):
    monkeypatch.setattr(hub, "HEADER", 50_000)
    options = ["--out=cached"] if command == "cache" else []
    assert cli.main([command, config_file, "--config.data.seq_len=100000", *options]) == 2
    assert "data.seq_len=100000" in capsys.readouterr().err
    ranges = [start for method, path, start in fake.asked if "/resolve/" in path]
    assert ranges == ["bytes=0-49999"] * 2 and not list(Path().iterdir())


@pytest.mark.parametrize("target", ["hf:org/Missing/x.gguf@packed", "hf:org", f"{TEACHER}@v9"])
def test_an_evaluation_of_what_is_not_there_is_bad_input(fake, capsys, target):
    """And no model that does not run."""
    assert cli.main(["evaluate", target]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: hf:org")


def test_a_refusal_leaves_no_workdir(config_file, fake, capsys):
    fake.gated = {"datasets/org/text"}
    assert cli.main(["train", config_file]) == 2
    assert "error: hf:datasets/org/text/test.jsonl: org/text is gated" in capsys.readouterr().err
    assert not fake.downloads() and not list(Path().iterdir())


@pytest.mark.slow
def test_a_whole_run_needs_nothing_before_it(config_file, fake, tmp_path):
    """In a process of its own, which knows the Hub by HF_ENDPOINT."""
    environ = os.environ | {
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "kdjax", "train", config_file, "--workdir=run"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    sources = json.loads(Path("run", "receipt.json").read_text())["sources"]
    assert sources["student.path"] == [f"{STUDENT}@{COMMIT}"]
    assert sources["data.heldout"] == [f"hf:datasets/org/text/test.jsonl@{COMMIT}"]
    assert sources["data.train"][0].startswith("python:tokenizers==")
    assert all(line.startswith("ok ") for line in verify(Path("run")))


# --- uploads ------------------------------------------------------------------------------------


SECRET = "hf_thisIsTheSecretTokenOfTheTest"


def test_a_file_comes_with_a_card_and_no_token(fake, said, models, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    run = tmp_path / "run"
    run.mkdir()
    sources = {"student.path": [f"hf:org/Base@{COMMIT}"]}
    sources["data.train"] = [f"hf:datasets/org/text/a.jsonl@{COMMIT}", "python:optax==1"]
    figures = {name: {"step": n, "kl": 1.5 / (n + 1)} for n, name in enumerate(("first", "final"))}
    receipt = {"sources": sources, "held_out": figures, "student": {"sha256": "5d"}}
    (run / "receipt.json").write_text(json.dumps(receipt))
    file = models / "student.gguf"
    assert cli.main(["push", str(file), "me/Small-GGUF", f"--run={run}"]) == 0
    assert f"/me/Small-GGUF/commit/{COMMIT}" in capsys.readouterr().out
    stored = fake.repositories["me/Small-GGUF"]
    assert set(stored) == {"student.gguf", "README.md"}
    assert stored["student.gguf"] == file.read_bytes()
    front, card = stored["README.md"].decode().split("---\n")[1:3]
    assert yaml.safe_load(front) == {
        "library_name": "gguf",
        "base_model": ["org/Base"],
        "base_model_relation": "quantized",
        "datasets": ["org/text"],
        "tags": ["distillation", "kdjax"],
    }
    assert "| 1.5 | 0.75 |" in card and "`5d`" in card
    assert not any(SECRET.encode() in body for body in fake.sent) and SECRET not in said()
    # Again, without a record: the file, and a card that claims nothing.
    hub_address = push_to_hub(file, "me/Small-GGUF")
    assert hub_address.endswith(COMMIT) and "base_model" not in str(stored["README.md"])


@pytest.mark.slow
def test_a_shrunk_file_comes_with_the_card_next_to_it(fake, models, tmp_path):
    """Unless the card is another file's, or a run is named; paths of this machine stay here."""
    file, card = tmp_path / "small.gguf", tmp_path / "small.md"
    file.write_bytes((models / "student.gguf").read_bytes())
    words = "Made by `kdjax shrink` of big.gguf, on text of `/home/me/text/`.\n\n| 0.1 |\n"
    card.write_text(f"# small.gguf\n\n{words}")
    push_to_hub(file, "me/Small-GGUF")
    stored = fake.repositories["me/Small-GGUF"]
    assert set(stored) == {"small.gguf", "README.md"}
    front, sent = stored["README.md"].decode().split("---\n")[1:3]
    assert yaml.safe_load(front)["library_name"] == "gguf"
    assert sent.startswith("\n# small.gguf\n\nMade by `kdjax shrink` of big.gguf")
    assert "| 0.1 |" in sent and "/home/me" not in sent
    for text in (f"# other.gguf\n\n{words}", "# small.gguf\n\nMine.\n"):
        card.write_text(text)
        push_to_hub(file, "me/Small-GGUF")
        assert b"exported by kdjax" in stored["README.md"] and b"0.1 |" not in stored["README.md"]
    card.write_text(f"# small.gguf\n\n{words}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "receipt.json").write_text('{"student": {"sha256": "5d"}}')
    push_to_hub(file, "me/Small-GGUF", run=run)
    assert b"`5d`" in stored["README.md"] and b"0.1 |" not in stored["README.md"]


def test_a_folder_is_uploaded_as_it_was_exported(fake, models, tmp_path):
    export_hf(load(models / "student.gguf", dtype="float32"), tmp_path / "hf")
    push_to_hub(tmp_path / "hf", "me/student")
    stored = fake.repositories["me/student"]
    assert sorted(stored) == names(tmp_path / "hf") and "README.md" in stored
    assert stored["model.safetensors"] == (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert b"library_name: transformers" in stored["README.md"]


def test_what_cannot_be_uploaded_is_named(fake, models, tmp_path, capsys, monkeypatch):
    file = models / "student.gguf"
    (tmp_path / "none").mkdir()
    (tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": str(tmp_path / "base"), "r": 8}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "adapter_config.json").write_text("{")
    for path, repository, message in (
        (tmp_path / "adapter", "me/x", "found the base .* a path of this machine; expected a rep"),
        (tmp_path / "none", "me/x", "none: found no config.json or adapter_config.json"),
        (tmp_path / "gone", "me/x", "gone: no such file or folder"),
        (tmp_path / "cut", "me/x", r"cut/adapter_config\.json: found a file that is no JSON"),
        (file, "x", "found 'x'; expected ORG/REPO, without"),
        (file, "me/..", r"found 'me/\.\.'; expected ORG/REPO, without"),
        (file, "me/x@main", "expected ORG/REPO, without a file or a revision"),
    ):
        with pytest.raises(UserError, match=message):
            push_to_hub(path, repository)
    with pytest.raises(UserError, match=r"found no receipt\.json; expected the workdir"):
        push_to_hub(file, "me/x", run=tmp_path / "none")
    fake.closed = True
    with pytest.raises(MissingFileError, match=r"me/x: .* refuses it .* Try `hf auth login`"):
        push_to_hub(file, "me/x")
    fake.closed, fake.broken = False, True
    with pytest.raises(MissingFileError, match=r"me/x: the Hub does not answer .* nothing was"):
        push_to_hub(file, "me/x")
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    with pytest.raises(MissingFileError, match=r"me/x: found a token with the character 'é'; exp"):
        push_to_hub(file, "me/x")
    assert cli.main(["push", str(file), "me/x", "--type=bf16"]) == 2
    assert "found --type=bf16 for what is no workdir" in capsys.readouterr().err
    assert not fake.blobs
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # nothing is read for a wrong name
    assert cli.main(["push", str(tmp_path / "run"), "me/"]) == 2
    assert "found 'me/'; expected ORG/REPO" in capsys.readouterr().err
