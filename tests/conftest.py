"""Test session: 8 emulated CPU devices, strict ranks, full matmul precision."""

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of the emulated devices. With one each (XLA's choice) a program of two collectives that do
# not depend on each other can block them all: some devices wait in the one, some in the other.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# NumPy's threads wait for more work by spinning: of products of small matrices half of the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test reaches the Hugging Face Hub, or looks into the user's cache of it.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE="/nonexistent/hub")

import jax
import programs
import pytest
from _pytest import runner
from _pytest.unraisableexception import gc_collect_iterations_key
from absl import flags
from jax._src import compiler

gc.disable()  # until pytest has found all tests, 6.2 s of a process in place of 7.6
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Tests compile the same small programs again and again; most of their time would go there.
# A scratch copy of the repository (`python -m scripts.contracts mutate`) shares the original's.
_CACHE = os.environ.get("KDJAX_TEST_CACHE") or Path(__file__).parents[1] / ".pytest_cache" / "xla"
_COMPILING = {
    "jax_compilation_cache_dir": str(_CACHE),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs run once: LLVM does not optimize them, and LLVM's IR is written without MLIR, whose
    # fusions take half of a compilation (test_step.py: 35 s of processor time, 18 without both).
    _COMPILING["jax_disable_most_optimizations"] = True
    if jax.__version_info__ < (0, 11):  # a later XLA aborts: it knows the first no more
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        )
for _name, _value in _COMPILING.items():
    jax.config.update(_name, _value)
    os.environ[_name.upper()] = str(_value)  # for the processes that tests start
programs.keep()
_compile, _compiled = compiler.backend_compile_and_load, {}


def _compile_once(backend, module, devices, options, callbacks):
    """Programs of several devices, not all of which are kept, are compiled once a process."""
    if len(devices) == 1 or callbacks:
        return _compile(backend, module, devices, options, callbacks)
    key = options.SerializeAsString(), str(module)
    if key not in _compiled:
        _compiled[key] = _compile(backend, module, devices, options, callbacks)
    return _compiled[key]


compiler.backend_compile_and_load = _compile_once
_read, _loaded = compiler._cache_read, {}


def _read_once(name, key, options, backend, devices, *callbacks):
    """The last 64 programs of one device are loaded once: a run that goes on has them again."""
    if len(devices) > 1 or any(callbacks):
        return _read(name, key, options, backend, devices, *callbacks)
    of = key, devices[0].id
    found = _loaded.pop(of, None) or _read(name, key, options, backend, devices, *callbacks)
    if found[0] is not None:
        _loaded[of] = found  # the newest is the last
        if len(_loaded) > 64:
            del _loaded[next(iter(_loaded))]
    return found


compiler._cache_read = _read_once
# glibc's, which other C libraries and macOS do not have. XLA's 89 threads share two arenas, else
# what is free lies in 16 of them, and blocks of 256 kB and more are returned when they are freed.
_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", lambda _: 0)
_trim = getattr(_libc, "MallocExtension_ReleaseFreeMemory", _trim)  # tcmalloc's: .ci/run loads it
if hasattr(_libc, "mallopt"):
    _libc.mallopt(-8, 2)  # M_ARENA_MAX
    _libc.mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD
# Grain asks absl for flags that pytest never parses.
flags.FLAGS.mark_as_parsed()


def pytest_configure(config):
    """Garbage is collected once at the end, to find what tests left, not five times."""
    config.stash[gc_collect_iterations_key] = 1


def pytest_collection_finish():
    """Programs stay in the cache, and garbage is collected seldom."""
    programs.stay_on()
    gc.collect()
    programs.collect_seldom()
    _dropped[0] = _measure_memory()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """A test and its fixtures as pytest runs them, with room for their frames."""
    return programs.call_with_room(runner.pytest_runtest_protocol, item, nextitem)


_dropped = [0.0]  # memory of the process when its programs were dropped, or when it began
# Bytes by which a process may grow before its programs are dropped. CI's slow tests have more: with
# 900 MB the commands of tests/test_detectors.py took 82 s of processor time in place of 99.
_GROWTH = float(os.environ.get("KDJAX_TEST_MEGABYTES", "300")) * 1e6


def _measure_memory():
    """Resident bytes, where Linux tells them."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _drop_programs(grown):
    """Drops compiled programs and traces if the process has grown by so many bytes with them.

    glibc keeps what was freed, unless it is told to return it.
    """
    if _measure_memory() > _dropped[0] + grown:
        _compiled.clear()
        _loaded.clear()
        jax.clear_caches()
        gc.collect()
        _trim(0)
        _dropped[0] = max(_dropped[0], _measure_memory() - 1e8)


@pytest.fixture(scope="module", autouse=True)
def _programs_end():
    """Programs end with their module, if they are many: a process grew to 6.8 GB.

    The next of several small modules finds the programs that load the same models.
    """
    yield
    # After every module, where nothing tells the memory.
    _drop_programs(_GROWTH * 2 / 3 if _dropped[0] else -1)


@pytest.fixture(autouse=True)
def _few_programs():
    """The programs of a large module end earlier: they were 600 MB of tests/test_export.py."""
    yield
    _drop_programs(_GROWTH)


@pytest.fixture(autouse=True)
def _own_log(monkeypatch):
    """A command that logs to its terminal leaves the log of the next test alone."""
    log = logging.getLogger("kdjax")
    monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr(log, "handlers", log.handlers)
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def types_unchecked():
    """Annotations are not checked, as in a user's run; elsewhere tests check them."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def mesh():
    """The mesh of one device."""
    from kdjax.device.sharding import make_local_mesh

    return make_local_mesh(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with teacher.gguf and student.gguf: random Q4_K_M files of two toy models."""
    from scripts.bench.synthetic import write_tiny_pair

    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    return folder


@pytest.fixture
def tiny_config(models, tmp_path):
    """The 7B config's tiny double on those models and a small text; caches under tmp_path."""
    return make_tiny_config(models, tmp_path)


def start_over(job, workdir, *, config=None, **changes):
    """The job for another run: its steps stay compiled, its batches and rounds begin again."""
    from kdjax.training.job import make_source

    config = config or job.config
    source = make_source(config, workdir, job.pair, job.rows, job.cache, job.step, job.teacher)
    return dataclasses.replace(job, config=config, workdir=workdir, source=source, **changes)


@pytest.fixture(scope="module")
def straight(job, tmp_path_factory):
    """The workdir of a run of the module's job that nothing stopped, and what was recorded."""
    from resuming import run_straight

    return run_straight(job, tmp_path_factory.mktemp("straight") / "run")


def without_page(hooks):
    """A run's hooks but for samples and page, which take seconds of their own."""
    from kdjax.watch.report import ReportPage
    from kdjax.watch.samples import Samples

    return [hook for hook in hooks if not isinstance(hook, Samples | ReportPage)]


@pytest.fixture(scope="session", autouse=True)
def _no_pictures():
    """Pages of runs have no pictures: two seconds of each, and one for what that imports."""
    from kdjax.watch.report import page

    draw = page._draw
    with mock.patch.object(page, "_draw", lambda *_: ("PHN2Zy8+", b"png")):
        yield draw


@pytest.fixture
def drawing(_no_pictures, monkeypatch):
    """The test looks at the pictures of pages."""
    monkeypatch.setattr("kdjax.watch.report.page._draw", _no_pictures)


@pytest.fixture
def without_walls(monkeypatch):
    """Nothing here confines programs, as in most containers."""
    from kdjax.evaluation import sandbox

    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.held.cache_clear()
    yield
    sandbox.held.cache_clear()


@contextlib.contextmanager
def lend_one():
    """Meshes of all devices are of the first; one whose devices or size are named has those."""
    from kdjax.device import sharding

    whole, make = jax.devices(), sharding.make_mesh

    def make_mesh(data, fsdp, tensor, devices=None):
        if data == -1 and (devices is None or len(devices) == len(whole)):
            devices = whole[:1]
        elif devices is None:
            devices = whole[: data * fsdp * tensor]
        return make(data, fsdp, tensor, devices)

    with (
        mock.patch.object(sharding, "make_mesh", make_mesh),
        mock.patch.object(jax, "device_count", lambda: 1),
    ):
        yield


@pytest.fixture(scope="module")
def one_device():
    """Runs and commands of the module have one device, not eight.

    What they compile is kept, for other modules and for the next run; of several devices programs
    with collectives are not. A run whose config names a number (`mesh.data=2`) gets that many.
    """
    with lend_one():
        yield


@pytest.fixture(scope="module")
def optimized():
    """LLVM optimizes the module's programs a little: they compute for longer than that takes.

    Programs of several devices, which are compiled in each process, stay as they are. None is kept
    from before or for later: the last bits of its numbers may differ. Processes that the module
    starts do the same.
    """
    flags = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
    choose = compiler.get_compile_options

    def choose_more(num_replicas, num_partitions, *args, **named):
        options = choose(num_replicas, num_partitions, *args, **named)
        if num_replicas * num_partitions == 1:
            options.executable_build_options.debug_options.xla_backend_optimization_level = 1
        return options

    _drop_programs(-1)
    with (
        mock.patch.object(compiler, "get_compile_options", choose_more),
        mock.patch.dict(os.environ, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}"),
    ):
        os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
        yield
    _drop_programs(-1)


def make_tiny_config(models, folder):
    """`tiny_config` for fixtures of a wider scope; text and caches under `folder`."""
    from kdjax.config import Config
    from kdjax.recipes import tiny
    from scripts.bench.synthetic import write_tiny_text

    text = folder / "text"
    write_tiny_text(text, [12] * 12)
    config = tiny(Config())
    # Both parts of the loss, and a T whose square counts: the defaults would show neither.
    config.loss.temperature, config.loss.alpha = 4.0, 0.3
    config.optim.final_learning_rate = 5e-7
    config.teacher.path, config.student.path = (
        str(models / f"{name}.gguf") for name in ("teacher", "student")
    )
    config.data.train, config.data.cache_dir = str(text), str(folder / "rows")
    config.data.seq_len = 32
    config.train.steps, config.eval.every, config.checkpoint.every = 10, 5, 5
    config.train.microbatches = 1
    config.log.tensorboard = False
    return config
