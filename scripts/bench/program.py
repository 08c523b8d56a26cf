"""One kdjax program in one process: what `scripts.bench.step` starts for each variant.

    python -m scripts.bench.program REQUEST.json RESULT.json

The request's fields are those of `Request`; the result is a list of figures, one dict a length.
"""

import dataclasses
import functools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdjax.config import Config, flatten, set_fields, validate
from kdjax.device import runtime
from kdjax.errors import UserError
from scripts.bench.rows import ids_of, made_records, made_rows, timed_steps

# A gap between two kernels is 1 to 3 us; one that the host makes is longer than this.
HOST_GAP_US = 20.0
# What moves to or from the host: a device that does nothing else waits.
HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")


@dataclasses.dataclass(frozen=True)
class Request:
    """A measurement: settings by their flat names, and one case a length."""

    settings: dict[str, Any]
    lengths: list[int]
    documents: str = "1"
    steps: int = 12
    host: bool = False  # also what the host costs
    matmul: int = 0  # instead of a step: a product of this size
    teacher_cache: str = ""  # "topk" or "hidden": random records of that kind, and no teacher
    k: int = 64  # ids a position, of "topk"
    devices: int = 0  # how many there must be; 0: any number
    whole: bool = False  # each of several devices stores all masters and adds gradients up once
    losses: int = 0  # also those of so many first steps, each of rows of its own
    profile: bool = False  # also where the first device's time went


def configured(settings: dict[str, Any]) -> Config:
    """The default config with these fields; text takes the type of the field's default.

    Raises `UserError` for a field that does not exist or cannot work.
    """
    config = Config()
    config.data.train = "(random tokens)"
    config.loss.temperature, config.loss.alpha = 4.0, 0.3  # both parts of the loss are timed
    config.loss.chunk_tokens = 1024  # its default, 0, wants a plan, and would differ by device
    known, typed = flatten(config), {}
    for name, value in settings.items():
        if name not in known:
            raise UserError(f"{name}={value!r}: no such field. See kdjax/config.py.")
        kind = type(known[name])
        if isinstance(value, str) and kind is bool:
            value = value.lower() in ("1", "true")
        typed[name] = kind(value)
    set_fields(config, typed)
    validate(config)
    return config


def make_job(request: Request, config: Config) -> Any:
    """A job without text or checkpoints: models of the config, steps, and random rows."""
    from kdjax.device import sharding
    from kdjax.device.placement import Placement
    from kdjax.training import step as training_step
    from kdjax.training.job import Job, build_step, text_source
    from kdjax.training.kinds import ask_kinds
    from kdjax.training.pair import open_pair
    from kdjax.training.teachers import CachedHidden, CachedTopK
    from kdjax.training.vocabulary import Vocabulary

    if request.whole:
        training_step.splits_state = sharding.splits_state = lambda mesh: False
    data, fsdp, tensor = config.mesh.data, config.mesh.fsdp or 1, config.mesh.tensor
    mesh = sharding.make_mesh(data, fsdp, tensor)
    if request.devices not in (0, mesh.size):
        raise UserError(f"found {mesh.size} devices, expected {request.devices}.")
    pair = open_pair(config)
    width = pair.vocabulary.width
    if pair.vocabulary.real < width - 1000:  # a random file's tokenizer knows few ids
        pair = dataclasses.replace(pair, vocabulary=Vocabulary(width, ids_of(width)))
    cached = {"topk": CachedTopK(request.k), "hidden": CachedHidden()}
    kind = cached.get(request.teacher_cache) or ask_kinds(config.teacher)[0]
    teacher, step, schedule = build_step(config, pair, Placement.on(mesh), kind)
    rows = random_rows(config, pair.vocabulary.real, request.documents)
    source = text_source(config.train, rows, None)
    return Job(config, Path(), pair, rows, teacher, step, kind, schedule, source, {})


def random_rows(config: Config, vocab: int, documents: str, batches: int = 64) -> Any:
    """Rows of the config's length, enough for so many batches."""
    from kdjax.data.rows import Rows, RowSet

    made = made_rows(
        batches * config.train.batch_size,
        config.data.seq_len,
        vocab,
        documents,
        config.data.max_segments,
    )
    return RowSet(Rows(*made), Rows(*made), {}, "")


def random_cache(job: Any) -> Any:
    """A cache of random records for the job's rows: written, hashed and opened as any other."""
    from kdjax.data.teacher_cache import open_cache, write
    from kdjax.training.identity import describe_cache

    about = describe_cache(job.config, job.pair, job.rows, job.kind, "(none)")
    block = made_records(about.record, job.config.train.batch_size, about.vocabulary[1])
    with tempfile.TemporaryDirectory() as folder:  # its files are mapped, and go with the job
        write(Path(folder), about, lambda rows: (block[[i % len(block)]] for i in rows))
        return open_cache(Path(folder), about)


def with_length(job: Any, length: int, request: Request) -> Any:
    """The same job with rows of that length; its step is traced anew for it."""
    from kdjax.training.job import text_source

    data = dataclasses.replace(job.config.data, seq_len=length)
    config = dataclasses.replace(job.config, data=data)
    # A row's hidden states of a 7B are 15 MB: 8 batches of them, half trained on, half held out.
    batches = 4 if request.teacher_cache else 64
    rows = random_rows(config, job.pair.vocabulary.real, request.documents, batches)
    job = dataclasses.replace(job, config=config, rows=rows)
    cache = random_cache(job) if request.teacher_cache else None
    return dataclasses.replace(job, cache=cache, source=text_source(config.train, rows, cache))


def measure(request: Request) -> list[dict[str, Any]]:
    """The figures of every length, in order; memory in 10^9 bytes, times in seconds or ms."""
    import jax

    config = configured(request.settings | {"data.seq_len": request.lengths[0]})
    start = time.perf_counter()
    job = make_job(request, config)
    jax.block_until_ready(job.teacher_params)
    loaded = time.perf_counter() - start
    state = job.make_state()
    found = []
    for length in request.lengths:
        job = with_length(job, length, request)
        figures, state = measure_step(job, state, request)
        about = {"length": length, "load_s": loaded, "teacher_cache": request.teacher_cache}
        found.append(about | figures)
    return found


def measure_step(job: Any, state: Any, request: Request) -> tuple[dict[str, Any], Any]:
    """Compiles the step for the job's rows and times it; returns figures and the state after."""
    import jax

    from kdjax.training.plan import make_plan

    batch = job.step.put(job.source.next({}))
    start = time.perf_counter()
    lowered = job.step.jitted.lower(state, job.teacher_params, batch, **job.step.fixed)
    compiled = functools.partial(lowered.compile(), **job.step.fixed)
    compile_s = time.perf_counter() - start
    memory = compiled.func.memory_analysis()

    def step() -> Any:
        nonlocal state
        state, metrics = compiled(state, job.teacher_params, batch)
        return metrics.loss[0] / metrics.loss[1]

    losses = []
    for _ in range(request.losses):
        rows = job.step.put(job.source.next({}))
        state, metrics = compiled(state, job.teacher_params, rows)
        losses.append(float(metrics.loss[0] / metrics.loss[1]))
    clock = timed_steps(step, float, request.steps)
    mesh, devices = job.step.placement.mesh, runtime.device_summary()
    tokens = job.config.train.batch_size * job.config.data.seq_len
    figures = {
        "step_ms": clock.median * 1e3,
        "spread_ms": clock.spread * 1e3,
        "processor_ms": clock.processor * 1e3,
        "tokens_per_s": tokens / clock.median,
        "flops_per_token": job.flops_per_token(),
        "teacher_gb": sum(x.nbytes for x in jax.tree.leaves(job.teacher_params)) / 1e9,
        "planned_gb": make_plan(job.config, job.pair, mesh, devices, job.kind).peak / 1e9,
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temporaries_gb": memory.temp_size_in_bytes / 1e9,
        "compile_s": compile_s,
        "first_step_s": compile_s + clock.first,
        "loss": clock.value,
        "losses": losses,
    }
    if request.profile:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(2):
                    value = step()
                float(value)
            figures |= split_time(device_events(Path(folder)), 2)
    if request.host:
        host, state = measure_host(job, compiled, state, batch, clock.median, request.steps)
        figures |= host
    return figures | {"peak_gb": peak_bytes() / 1e9}, state


def peak_bytes() -> int:
    """The most that the device held so far; on a CPU, the process's own memory."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return (
        stats.get("peak_bytes_in_use") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def measure_host(
    job: Any, train_step: Any, state: Any, batch: Any, step_s: float, steps: int
) -> tuple[dict[str, Any], Any]:
    """Measures the host's cost: steps of the loop against steps with nothing between them."""
    import jax

    def bare(state: Any) -> Any:
        for _ in range(steps):
            state, _ = train_step(state, job.teacher_params, batch)
        return jax.block_until_ready(state)

    def clocked(run: Any, state: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        state = run(state)
        return (time.perf_counter() - start) / steps, state

    _, state = clocked(bare, state)
    bare_s, state = clocked(bare, state)
    as_loop = functools.partial(run_loop, job, train_step, steps)
    _, state = clocked(as_loop, state)
    loop_s, state = clocked(as_loop, state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state = as_loop(state)
        idle = idle_share(device_events(Path(folder)), HOST_GAP_US * 1e3)
    rows = pipeline_rows_per_s(job)
    return {
        "bare_ms": bare_s * 1e3,
        "loop_ms": loop_s * 1e3,
        "host_share": 1 - bare_s / loop_s,
        "device_idle_share": idle,
        "pipeline_rows_per_s": rows,
        "pipeline_over_appetite": rows * step_s / job.config.train.batch_size,
    }, state


def run_loop(job: Any, train_step: Any, steps: int, state: Any) -> Any:
    """Runs steps as `kdjax.training.loop`: batch, transfer, dispatch, the figures one step late."""
    from kdjax.training.loop import _Delivery

    delivery = _Delivery([], job.schedule)
    for step in range(1, steps + 1):
        batch = job.source.next(state.params)
        state, metrics = train_step(state, job.teacher_params, job.step.put(batch))
        delivery.push(step, metrics, batch)
    delivery.flush()
    return state


def pipeline_rows_per_s(job: Any, seconds: float = 2.0) -> float:
    """Rows a second that the input pipeline makes when nothing else runs."""
    for _ in range(16):  # what it made ahead
        job.source.next({})
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        job.source.next({})
        count += 1
    return count * job.config.train.batch_size / passed


def device_events(folder: Path) -> list[tuple[float, float, str]]:
    """(start, end, name), in ns, of all that the first GPU of a profile did; none on a CPU."""
    import jax

    found = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU:0"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [
                        (event.start_ns, event.end_ns, event.name)
                        for event in line.events
                        if not event.name.startswith(HOST_COPIES)
                    ]
    return found


def idle_share(events: Iterable[tuple[float, float, str]], least_gap: float) -> float | None:
    """The share of the time from first to last event in gaps of at least `least_gap`."""
    events = sorted(events)
    if not events:
        return None
    begin, busy_until = events[0][:2]
    idle = 0.0
    for start, end, _ in events:
        if start - busy_until >= least_gap:
            idle += start - busy_until
        busy_until = max(busy_until, end)
    return idle / (busy_until - begin)


def split_time(events: list[tuple[float, float, str]], steps: int) -> dict[str, float]:
    """Milliseconds a step of sums by NCCL, of copies, those of both with nothing beside, and idle.

    Empty without events.
    """

    def busy(chosen: Iterable[tuple[float, float, str]]) -> float:
        total, until = 0.0, 0.0
        for start, end, _ in sorted(chosen):
            total += max(end - max(start, until), 0.0)
            until = max(until, end)
        return total / steps / 1e6

    if not events:
        return {}
    span = max(end for _, end, _ in events) - min(start for start, *_ in events)
    whole = busy(events)
    found = {"idle_ms": span / steps / 1e6 - whole}
    for kind, prefix in (("sums", "nccl"), ("copies", "Memcpy")):
        ours = [event for event in events if event[2].startswith(prefix)]
        others = [event for event in events if not event[2].startswith(prefix)]
        found |= {f"{kind}_ms": busy(ours), f"{kind}_alone_ms": whole - busy(others)}
    return found


def matmul_rate(size: int, dtype: str) -> dict[str, Any]:
    """FLOP/s of a square product of random numbers."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.dtype(dtype)) for i in (0, 1))
    product = jax.jit(jnp.matmul)
    clock = timed_steps(lambda: product(a, b), lambda c: float(jax.block_until_ready(c)[0, 0]), 32)
    return {"matmul_flops": 2 * size**3 / clock.median}


def main() -> None:
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    runtime.configure()
    if request.matmul:
        rate = matmul_rate(request.matmul, request.settings["train.compute_dtype"])
        found = [rate | {"devices": str(runtime.device_summary())}]
    else:
        found = measure(request)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
