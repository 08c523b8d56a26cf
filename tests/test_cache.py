"""The cached teacher: its shards, and training from them."""

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import make_tiny_config
from quick import cases
from test_run import Recorder, go

from kdjax.data import pipeline, teacher_cache
from kdjax.data.rows import COLUMNS, Rows
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.formats.locks import LockedError
from kdjax.training import caching
from kdjax.training.caching import cache_teacher
from kdjax.training.job import assemble
from kdjax.training.teachers import CachedHidden, CachedTopK

pytestmark = pytest.mark.usefixtures("one_device")

REPOSITORY = Path(__file__).parent.parent


# ---- the shards


SPEC = teacher_cache.CacheSpec(
    "topk", 4, 1.0, "a" * 64, "rows", "tokenizer", (50, 47), 6, 8, "float32", "dense", (7, 3)
)


@pytest.fixture
def small_shards(monkeypatch):
    """Four rows of `SPEC` a shard."""
    monkeypatch.setattr(teacher_cache, "SHARD_BYTES", 4 * SPEC.record.itemsize)


def records(rows):
    out = np.zeros(len(rows), SPEC.record)
    for i, row in enumerate(rows):
        rng = np.random.default_rng(row)
        out[i] = np.frombuffer(rng.bytes(SPEC.record.itemsize), SPEC.record)[0]
    return out


def produce(rows):
    for start in range(0, len(rows), 3):
        yield records(rows[start : start + 3])


def same_bytes(columns, row):
    want = records(range(row, row + 1))[0]
    assert list(columns) == ["teacher_ids", "teacher_logits", "teacher_odds", "teacher_label"]
    for name, value in zip(want.dtype.names, columns.values(), strict=True):
        assert value.tobytes() == want[name].tobytes()


def test_rows_come_back_as_they_were_written(tmp_path, small_shards):
    teacher_cache.write(tmp_path, SPEC, produce)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "index.json",
        "shard-00000.bin",
        "shard-00001.bin",
        "shard-00002.bin",
    ]
    cache = teacher_cache.open_cache(tmp_path, SPEC)
    for row in range(7):
        same_bytes(cache.train[row], row)
    for row in range(3):
        same_bytes(cache.heldout[row], 7 + row)


def test_a_stopped_writer_continues_and_mends_what_is_damaged(tmp_path, small_shards):
    calls = []

    def stopped(rows):
        calls.append(rows[0])
        if len(calls) == 3:
            yield records(rows)[:1]
            raise KeyboardInterrupt
        yield from produce(rows)

    with pytest.raises(KeyboardInterrupt):
        teacher_cache.write(tmp_path, SPEC, stopped)
    with pytest.raises(UserError, match="found 2 of 3 shards; expected a complete cache"):
        teacher_cache.open_cache(tmp_path, SPEC)
    data = bytearray((tmp_path / "shard-00000.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "shard-00000.bin").write_bytes(data)
    calls.clear()

    def counted(rows):
        calls.append(rows[0])
        return produce(rows)

    teacher_cache.write(tmp_path, SPEC, counted)
    assert calls == [0, 8]  # the altered one and the missing one
    calls.clear()
    teacher_cache.write(tmp_path, SPEC, counted)
    assert calls == []
    same_bytes(teacher_cache.open_cache(tmp_path, SPEC).train[1], 1)


SLOW_WRITER = """
import dataclasses, sys, time
import numpy as np
from pathlib import Path
from kdjax.data import teacher_cache
spec = teacher_cache.CacheSpec(**eval(sys.argv[2]))
teacher_cache.SHARD_BYTES = 4 * spec.record.itemsize
def produce(rows):
    yield np.zeros(len(rows[:1]), spec.record)
    time.sleep(60 if rows[0] == 8 else 0)
    yield np.zeros(len(rows[1:]), spec.record)
teacher_cache.write(Path(sys.argv[1]), spec, produce)
"""


def test_a_killed_writer_leaves_whole_shards_and_is_continued(tmp_path, small_shards):
    about = dataclasses.asdict(SPEC)
    command = [sys.executable, "-c", SLOW_WRITER, str(tmp_path), str(about)]
    child = subprocess.Popen(command, cwd=REPOSITORY)
    index = tmp_path / "index.json"
    try:
        while not (index.exists() and len(json.loads(index.read_text())["shards"]) == 2):
            assert child.poll() is None
            time.sleep(0.02)
        with pytest.raises(LockedError, match=rf"in use by process {child.pid} .* another --out"):
            teacher_cache.write(tmp_path, SPEC, produce)
    finally:
        child.kill()  # SIGKILL, inside the third shard
        child.wait()
    starts = []

    def rest(rows):
        starts.append(rows[0])
        yield np.zeros(len(rows), SPEC.record)

    (tmp_path / f".shard-00002.bin.{child.pid}.tmp").touch()  # made, or about to be
    teacher_cache.write(tmp_path, SPEC, rest)
    assert starts == [8]
    teacher_cache.write(tmp_path / "fresh", SPEC, rest)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "fresh").iterdir()}
    assert len(fresh) == 4
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == fresh


@pytest.mark.parametrize("how", ["altered", "truncated", "missing"])
def test_a_shard_that_is_not_as_written_is_refused(tmp_path, small_shards, how):
    teacher_cache.write(tmp_path, SPEC, produce)
    path = tmp_path / "shard-00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "truncated" else data)
    says = {"altered": "SHA-256", "truncated": "bytes, expected", "missing": "is missing"}
    with pytest.raises(UserError, match=rf"shard-00001.bin .*{says[how]}"):
        teacher_cache.open_cache(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("about k", 0),
        ("about k", -1),
        ("about temperature", None),
        ("about temperature", np.nan),
        ("about positions", 10**30),
        ("about positions", 0),
        ("about sides", [10**13, 4]),
        ("about sides", [6, "4"]),
        ("about vocabulary", [True, 46]),
        ("complete", None),
        ("shards", []),
        ("shards shard-00000.bin rows", []),
        ("shards shard-00000.bin rows", [[0, 10**13]]),
        ("shards shard-00000.bin rows", [[9, 10]]),
        ("shards shard-00000.bin rows", [[-1, 1]]),
        ("shards shard-00000.bin rows", [[1, 0]]),
        ("shards shard-00000.bin rows", [[0.0, 1.0]]),
        ("shards shard-00000.bin sha256", None),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, small_shards, at, value):
    """By reader and writer, before they ask for memory of a size that it says."""
    some = np.asarray([1, 2, 4]) if "bin" in at else None  # only then are rows listed
    teacher_cache.write(tmp_path, SPEC, produce, some)
    path = tmp_path / teacher_cache.INDEX
    index = place = json.loads(path.read_text())
    *above, last = at.split()
    for name in above:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    path.write_text(json.dumps(index))
    for use in (teacher_cache.open_cache, functools.partial(teacher_cache.write, produce=produce)):
        with pytest.raises(UserError, match=r"found no index of a cached|sides: the cache has"):
            use(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("teacher", "b" * 64),
        ("weights", "float8"),
        ("rows", "other"),
        ("tokenizer", "other"),
        ("temperature", 2.0),
        ("vocabulary", (50, 46)),
        ("sides", (6, 4)),
    ],
)
def test_a_cache_of_something_else_is_refused_with_both_values(tmp_path, field, value):
    teacher_cache.write(tmp_path, SPEC, produce)
    other = dataclasses.replace(SPEC, **{field: value})
    mine = re.escape(str(getattr(SPEC, field)))
    with pytest.raises(UserError, match=rf"{field}: the cache has {mine}, this run "):
        teacher_cache.open_cache(tmp_path, other)
    with pytest.raises(UserError, match=rf"holds another cache:\n  {field}: the cache has"):
        teacher_cache.write(tmp_path, other, produce)


def test_a_cache_of_an_earlier_version_is_read_and_mended(tmp_path, small_shards):
    """Its index says `compute`, in old words; the hash by which runs know it stays."""
    teacher_cache.write(tmp_path, SPEC, produce)
    path = tmp_path / teacher_cache.INDEX
    index = json.loads(path.read_text())
    assert index["about"].pop("weights") == "dense"
    index["about"]["compute"] = "train"
    path.write_text(json.dumps(index))
    sha256 = teacher_cache.open_cache(tmp_path, SPEC).sha256
    (tmp_path / "shard-00001.bin").unlink()
    teacher_cache.write(tmp_path, SPEC, produce)
    assert teacher_cache.open_cache(tmp_path, SPEC).sha256 == sha256
    index["about"]["compute"] = "fp8"
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"weights: the cache has float8, this run dense"):
        teacher_cache.open_cache(tmp_path, SPEC)
    del index["shards"]
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"found no index of a cached teacher \(KeyError: 'shards'"):
        teacher_cache.read_index(tmp_path)


def test_a_cache_that_cannot_be_read_is_not_to_be_deleted(tmp_path, monkeypatch):
    """Neither a model's file in its place, nor a folder of somebody else."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(MissingFileError, match=r"model.gguf/index.json: found no such file"):
        teacher_cache.read_index(tmp_path / "model.gguf")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError):
        teacher_cache.read_index(tmp_path)


def test_rows_are_added_to_a_cache_that_runs_know_by_its_first_shard(tmp_path, small_shards):
    """Shards of the rows that are wanted; a damaged one is written again as it was."""
    teacher_cache.write(tmp_path, SPEC, produce, np.asarray([1, 2, 4, 6, 7, 8, 9]))
    assert [p.stat().st_size // SPEC.record.itemsize for p in sorted(tmp_path.glob("*.bin"))] == [
        4,
        3,
    ]
    cache = teacher_cache.open_cache(tmp_path, SPEC, np.asarray([4, 8]))
    assert "7 of 10 rows" in str(cache)
    for row in (1, 2, 4, 6):
        same_bytes(cache.train[row], row)
    same_bytes(cache.heldout[2], 9)
    with pytest.raises(UserError, match=r"found 1 of the 3 rows .* --out=\S+`, or --all"):
        teacher_cache.open_cache(tmp_path, SPEC, np.asarray([0, 1, 3]))
    with pytest.raises(UserError, match="found 7 of the 10 rows"):
        teacher_cache.open_cache(tmp_path, SPEC)
    written = []

    def noted(rows):
        written.append(list(rows))
        return produce(rows)

    (tmp_path / "shard-00000.bin").unlink()
    teacher_cache.write(tmp_path, SPEC, noted, np.asarray([0, 1, 7, 8, 9]))
    assert written == [[1, 2, 4, 6], [0]]
    teacher_cache.write(tmp_path, SPEC, noted)
    assert written[2:] == [[3, 5]]
    whole = teacher_cache.open_cache(tmp_path, SPEC)
    assert whole.sha256 == cache.sha256
    for row in range(7):
        same_bytes(whole.train[row], row)
    index = json.loads((tmp_path / teacher_cache.INDEX).read_text())
    index["shards"]["shard-00000.bin"]["sha256"] = "0" * 64
    assert teacher_cache.hash_index(index) != cache.sha256


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    free = 10 * SPEC.record.itemsize
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"expected 0\.00 GB and 1% to spare"):
        teacher_cache.write(tmp_path, SPEC, produce)
    assert not list(tmp_path.iterdir())


# ---- training from it


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A config, and its live teacher's curve."""
    folder = tmp_path_factory.mktemp("cached")
    config = make_tiny_config(models, folder)
    config.checkpoint.every = 0
    return config, folder, curve(config, folder / "live")


def curve(config, workdir):
    recorder = Recorder()
    assert go(config, workdir, recorder) == "finished"
    return recorder.curve()


def with_cache(config, folder, **changes):
    for name, value in {"teacher__cache": str(folder), **changes}.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def make(run, kind, k=0):
    """The cache of the run's teacher, made once; what was logged then lies beside it."""
    config, folder, _ = run
    out = folder / f"{kind}{k}"
    if not out.exists():
        handler, logger = logging.FileHandler(f"{out}.log"), logging.getLogger("kdjax")
        logger.addHandler(handler)
        with contextlib.closing(handler):
            cache_teacher(config, out, CachedTopK(k) if kind == "topk" else CachedHidden())
        logger.removeHandler(handler)
    return out


@pytest.mark.slow
def test_hidden_states_train_as_the_teacher_itself_bit_for_bit(run):
    config, folder, live = run
    assert curve(with_cache(config, make(run, "hidden")), folder / "from-hidden") == live


@pytest.mark.slow
def test_all_ids_train_as_the_teacher_itself(run):
    config, folder, live = run
    got = curve(with_cache(config, make(run, "topk", 305)), folder / "from-topk")
    assert [call[:2] for call in got] == [call[:2] for call in live]
    for (_, _, a), (_, _, b) in zip(got, live, strict=True):
        a = {name.removesuffix("_topk"): value for name, value in a.items()}
        assert a.keys() == b.keys()
        np.testing.assert_allclose([a[k] for k in b], list(b.values()), rtol=2e-4)
    assert "kl_topk" in got[0][2] and "kl" not in got[0][2]  # named for what it is


@pytest.mark.parametrize(
    ("kind", "k", "little"),
    [
        ("topk", 8, True),
        pytest.param("topk", 305, False, marks=pytest.mark.slow),
        ("hidden", 0, False),
    ],
)
def test_ids_that_hold_little_of_the_probability_are_named(run, kind, k, little):
    log = Path(f"{make(run, kind, k)}.log").read_text()
    assert ("of the teacher's probability" in log) is little, log
    if little:
        assert float(re.search(r"8 ids hold ([\d.]+)%", log)[1]) < 20  # of 305, nearly even


@pytest.mark.parametrize(
    ("temperature", "remedy"), [(1.0, "a larger --k"), (4.0, "--config.loss.temperature=1")]
)
def test_few_ids_are_warned_of_with_what_helps(temperature, remedy, caplog):
    """Not with the temperature that the run has."""
    odds = np.full((2, 3), 2.0)  # of the tail: 0.88
    caching._warn_of_tail(odds, dataclasses.replace(SPEC, temperature=temperature))
    (record,) = caplog.records
    assert "hold 11.9%" in record.getMessage()
    assert record.getMessage().endswith(f"Take {remedy} or --kind=hidden.")


@pytest.mark.parametrize("kind", cases("topk", slow=["hidden"]))
def test_the_teacher_is_not_loaded(run, tmp_path, kind):
    """The compiled step's arguments: the state and the batch; of hidden states also the head."""
    config = with_cache(run[0], make(run, kind, 8 if kind == "topk" else 0))
    job = assemble(config, tmp_path)
    head = 0 if kind == "topk" else 320 * 256 * 2
    assert sum(x.nbytes for x in jax.tree.leaves(job.teacher.params)) == head
    batch = job.step.put(job.source.next({}))
    state = job.make_state()
    arguments = jax.tree.leaves((state, batch))
    compiled = job.step.jitted.lower(state, job.teacher.params, batch, **job.step.fixed).compile()
    local = sum(x.addressable_shards[0].data.nbytes for x in arguments)
    assert compiled.memory_analysis().argument_size_in_bytes <= local + head + 1024


@pytest.mark.slow
def test_microbatches_and_meshes_change_nothing(run, tmp_path):
    changes = dict(mesh__data=8, train__batch_size=16, train__steps=2, optim__warmup_steps=1)
    config = with_cache(run[0], make(run, "topk", 8), **changes)
    want = curve(config, tmp_path / "one")
    other = dict(train__microbatches=2, mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    got = curve(with_cache(config, config.teacher.cache, **other), tmp_path / "other")
    for (_, _, a), (_, _, b) in zip(got, want, strict=True):
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(loss__temperature=2.0), "temperature: the cache has 4.0, this run 2.0"),
        (dict(data__heldout_fraction=0.3), "rows: the cache has"),
    ],
)
def test_a_changed_run_is_refused(run, tmp_path, changes, says):
    config = with_cache(run[0], make(run, "topk", 8), **changes)
    with pytest.raises(UserError, match=says):
        assemble(config, tmp_path)


@pytest.mark.slow
def test_a_run_finds_just_the_rows_that_it_reads(run, tmp_path):
    """A longer run is refused before its first step; the cache it adds to stays the first one's."""
    short = dict(train__steps=2, train__batch_size=8, optim__warmup_steps=1, eval__rows=3)
    config, out = with_cache(run[0], "", **short), tmp_path / "cache"
    cache_teacher(config, out, CachedHidden())
    counts = [s["rows"] for s in json.loads((out / "index.json").read_text())["shards"].values()]
    held = sum(last - first + 1 for runs in counts for first, last in runs)
    job = assemble(with_cache(config, out), tmp_path)
    assert held == 16 + 3 < min(len(job.rows.train), 16 + len(job.rows.heldout))
    live = curve(with_cache(config, ""), tmp_path / "live")
    assert curve(with_cache(config, out), tmp_path / "cached") == live
    with pytest.raises(UserError, match=f"found {held - 1} of the {held + 1} rows that this"):
        assemble(with_cache(config, out, eval__rows=4), tmp_path)
    longer = with_cache(config, "", train__steps=3)
    with pytest.raises(UserError, match=f"found {held} of the {held + 8} rows that this run reads"):
        assemble(with_cache(longer, out), tmp_path)
    cache_teacher(longer, out, CachedHidden())
    assert (
        assemble(with_cache(longer, out), tmp_path).identity["teacher.cache"]
        == (job.identity["teacher.cache"])
    )
    assert (
        curve(with_cache(longer, out), tmp_path / "longer")[:2]
        == curve(with_cache(longer, ""), tmp_path / "longer-live")[:2]
    )
    cache_teacher(longer, out, CachedHidden(), all_rows=True)
    assert "of {0:,} of {0:,} rows".format(len(job.rows.train) + len(job.rows.heldout)) in str(
        assemble(with_cache(longer, out), tmp_path).cache
    )


@pytest.mark.parametrize("batches", [1, 3, 9])
def test_rows_of_the_first_batches_are_those_that_a_source_gives(batches):
    rows = Rows(*(np.ones((40, 5), np.uint16) for _ in COLUMNS))
    source = pipeline.TextSource(rows, batch_size=8, seed=3)
    read = [source.next()["row_ids"] for _ in range(batches)]
    listed = pipeline.list_rows(40, batch_size=8, seed=3, batches=batches)
    np.testing.assert_array_equal(listed, np.unique(np.concatenate(read)))


def test_another_teacher_is_refused(run, tmp_path):
    config = with_cache(run[0], make(run, "topk", 8))
    other = tmp_path / "teacher.gguf"
    data = bytearray(Path(config.teacher.path).read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    config.teacher.path = str(other)
    with pytest.raises(UserError, match=r"teacher: the cache has [0-9a-f]{64}, this run "):
        assemble(config, tmp_path)


@pytest.mark.parametrize("kind", cases(CachedTopK(8), slow=[CachedHidden()]))
def test_outputs_that_are_no_numbers_are_not_stored(run, tmp_path, kind):
    """A block of the teacher has a scale that is NaN."""
    config = with_cache(run[0], "")
    table, rows = open_table(config.teacher.path), []
    for name in table:
        info, raw = table.info(name), np.array(table.raw(name))
        if name == "blk.0.ffn_up.weight":
            assert info.dtype == "Q4_K"
            raw[7, :2] = np.array([np.nan], "<f2").view(np.uint8)
        rows.append((name, info.dtype, info.shape, raw))
    config.teacher = dataclasses.replace(config.teacher, path=str(tmp_path / "odd.gguf"))
    write_gguf(config.teacher.path, table.metadata, rows)
    said = r"odd\.gguf: found outputs of the teacher that are not numbers; .*`kdjax evaluate` says"
    with pytest.raises(UserError, match=said):
        cache_teacher(config, tmp_path / "cache", kind)
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_batches_carry_the_rows_own_columns(run, tmp_path):
    job = assemble(with_cache(run[0], make(run, "topk", 8)), tmp_path)
    batch, cache = job.source.next({}), job.cache
    for got, row in zip(batch["teacher_label"], batch["row_ids"], strict=True):
        np.testing.assert_array_equal(got, cache.train[int(row)]["teacher_label"])
    limit, held = job.config.eval.rows, job.rows.heldout
    batch = next(pipeline.eval_batches(held, batch_size=2, limit=limit, more=cache.heldout))
    record = cache.heldout[int(batch["row_ids"][1])]
    np.testing.assert_array_equal(batch["teacher_odds"][1], record["teacher_odds"])
