"""Saving and resuming; `formats.saved` reads these checkpoints without Orbax's manager.

A checkpoint holds the student, the optimizer, the data position and the run's identity; never the
teacher, which is recorded by path, size and hash. A save is written aside and renamed, so a kill at
any moment leaves the previous one intact. Every array has its checksum, computed where the array is
and compared with the disk before a run resumes from it.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from kdjax.config import Config
from kdjax.device.sharding import count_bytes, make_local_mesh
from kdjax.errors import CheckError, UserError, WriteError
from kdjax.formats import TensorTable
from kdjax.formats.checksums import add_up, checksum
from kdjax.formats.files import replacing, writing
from kdjax.formats.saved import (
    CHECKPOINTS,
    CHECKSUMS,
    DIGEST,
    RECEIPT,
    Best,
    DamagedError,
    OrbaxPath,
    array_name,
    check_folder,
    find_damage,
    reading,
    record_digest,
    saved_run,
    saved_steps,
    saved_when,
    step_folder,
)
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, Params, functional, initialise
from kdjax.models.loading import load_params
from kdjax.training.clock import Clock
from kdjax.training.step import Step, TrainState, check_kind, refuse_donated

_log = logging.getLogger("kdjax")

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages
UNJUDGED = "unjudged"  # in a step's record: a stop came before its held-out evaluation
_STATE = "state"  # in `run`, of a custom loop: its arrays
_LARGE = 1_000_000_000  # bytes above which a save is logged, as it takes long
_REDRAWN = 1e-5  # random numbers differ in their last bits on other hardware


@dataclasses.dataclass
class _Kept(PreservationPolicy):
    """Keeps the newest steps and the best one."""

    newest: int
    checkpoints: "Checkpoints"

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each, in order of steps."""
        best = self.checkpoints.best
        old = max(len(checkpoints) - self.newest, 0)
        return [i >= old or bool(best and best.step == c.step) for i, c in enumerate(checkpoints)]


class Checkpoints:
    """Checkpoints of one workdir, under `workdir/checkpoints/<step>`.

    Opening them clears what a kill left of a save, and moves damaged newest steps aside. Raises
    `CheckError` if there are steps and none is intact, or if the newest is of another step than its
    folder says.
    """

    def __init__(
        self,
        workdir: Path,
        keep: int,
        *,
        asynchronous: bool | None = None,
        look: bool = True,  # whether to check the newest step for damage, which reads it
    ):
        # On a CPU the copies of a background save (6 GB for a 0.5B student) would sit in the same
        # memory as the next step's temporaries: save there at once, 1 GB at a time.
        on_cpu = jax.default_backend() == "cpu"
        if asynchronous is None:
            asynchronous = not on_cpu
        # zstd makes trained numbers 6% smaller, one array on one core: three quarters of a save.
        handler = ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=1 if on_cpu else 96, restore_concurrent_gb=96, use_compression=False
        )
        check_folder(workdir)
        self._workdir, self._keep = workdir, keep
        self.best: Best | None = None  # a step that stays, in addition to the newest
        self._folder = (workdir / CHECKPOINTS).resolve()
        self._in_flight = False
        self._quiet = contextlib.ExitStack()
        with self._writing():
            self._remove_unfinished()
            if jax.process_index() == 0 and look:
                _set_aside_damaged(workdir)
            if jax.process_count() > 1:  # the others open the folder once it is in order
                multihost_utils.sync_global_devices("checkpoints in order")
            self._manager = ocp.CheckpointManager(
                OrbaxPath(self._folder),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_Kept(keep, self),
                    enable_async_checkpointing=asynchronous,
                ),
                item_names=("state", "run"),
                item_handlers={"state": handler, "run": ocp.JsonCheckpointHandler()},
            )
        self._quiet.callback(_quiet_threads())

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Saves the state under its step's number, in the background if asynchronous.

        Once it returns, the arrays may be donated. Raises `WriteError` if this save, or the one
        before it, could not be written, and `CheckError` if the folder holds a later step.
        """
        step = int(state.step)
        self.wait()
        if (need := self.check_room(state)) >= _LARGE:
            _log.info("saving a checkpoint of %.2f GB", need / 1e9)
        self._warn_of_next(need)
        run = run | {CHECKSUMS: checksums(state)}
        run[DIGEST] = record_digest(run)
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), run=ocp.args.JsonSave(run))
        self._in_flight = True
        with self._writing():
            begun = self._manager.save(step, args=items)
        if not begun:  # Orbax skips a step that is not later than what it has
            raise CheckError(
                f"step {step} was not saved: {self._folder} holds step {self.latest()}. Move the "
                "steps of another run elsewhere, or use another workdir."
            )

    def note_judged(self, step: int, changes: dict[str, Any]) -> None:
        """Changes the record of a saved step whose held-out evaluation was pending."""
        if jax.process_index() == 0:
            run = saved_run(self._workdir, step) | changes
            del run[UNJUDGED]
            run[DIGEST] = record_digest(run)
            with replacing(step_folder(self._workdir, step) / "run" / "metadata") as file:
                file.write(json.dumps(run).encode())

    def check_room(self, state: TrainState) -> int:
        """Bytes of a checkpoint of these arrays; raises `WriteError` if the disk has no room."""
        need = count_bytes(state)
        disk = shutil.disk_usage(self._folder)
        if disk.free < need and disk.total:  # some file systems do not say
            raise WriteError(
                f"{self._folder}: found {disk.free / 1e9:.3f} GB free on its disk; expected "
                f"{need / 1e9:.3f} GB for a checkpoint. Free some space there, or name a folder "
                "on another disk, and run the same command again."
            )
        return need

    def _warn_of_next(self, need: int) -> None:
        """Warns where this checkpoint takes the room of the next: no old one makes room for it."""
        disk, keeps = shutil.disk_usage(self._folder), len(self._manager.all_steps()) < self._keep
        if keeps and need <= disk.free < 2 * need:
            _log.warning(
                "%s: this checkpoint leaves %.2f GB of its disk, the next needs %.2f: free some, "
                "or what is trained from here on is lost",
                *(self._folder, (disk.free - need) / 1e9, need / 1e9),
            )

    def raise_failed(self) -> None:
        """Raises `WriteError` if a save that began in the background has failed since."""
        if self._in_flight and not self._manager.is_saving_in_progress():
            self.wait()

    def restore(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """Restores the state of `step` in these shapes, dtypes and shardings, on any mesh.

        Raises `DamagedError` if it cannot be read.
        """

        def place(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        abstract = jax.tree.map(place, shapes, shardings)
        placed = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=abstract, restore_args=placed))
        with reading(step_folder(self._workdir, step), "state"):
            return self._manager.restore(step, args=args)["state"]

    def wait(self) -> None:
        """Waits for a save in flight; raises `WriteError` if it could not be written."""
        self._in_flight = False
        with self._writing():
            self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes; an interrupt does not wait for a save in flight, which is then dropped."""
        with self._quiet:
            if kind is None:
                self.close()
            elif not issubclass(kind, KeyboardInterrupt):
                with contextlib.suppress(WriteError):  # an error ends the run already
                    self.close()

    def close(self) -> None:
        """Waits for a save in flight, then releases the threads."""
        with self._quiet:
            self.wait()
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises `WriteError` for errors of the disk, and removes the unfinished step."""
        try:
            with writing(self._folder):
                try:
                    yield
                except ValueError as error:  # TensorStore's
                    if found := _OS_ERROR.search(str(error)):
                        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
                    raise
        except WriteError:
            self._quiet.pop_all()  # for good: TensorStore's threads end after the error
            with contextlib.suppress(OSError):
                self._remove_unfinished()  # the receipt needs space, too
            raise

    def _remove_unfinished(self) -> None:
        """Removes saves that were cut short.

        Orbax would do it in a thread, which prints a traceback if the process ends first.
        """
        if jax.process_index() == 0:
            for leftover in self._folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)


def save_state(folder: str | Path, state: TrainState, *, keep: int = 2) -> None:
    """Saves the state of a custom loop under its step's number; keeps the newest `keep`.

    Every array has its checksum; a kill at any moment leaves the previous step intact. States have
    no teacher. Raises `UserError` for a folder that holds this step or a later one, or a run of
    `distill`, and for a `keep` below 1; `WriteError` for a disk that is full or takes no writing.

        kdjax.save_state("runs/own", state)
    """
    refuse_donated(state)
    if keep < 1:
        raise UserError(f"found keep={keep}; expected 1 or more: this step is one of them.")
    folder, step = _check_folder(folder), int(state.step)
    if (folder / RECEIPT).exists():
        raise UserError(
            f"{folder} holds a run of kdjax train; expected a folder of a custom loop: name "
            "another."
        )
    latest = max(saved_steps(folder), default=-1)
    if step <= latest:
        raise UserError(
            f"{folder}: found step {latest} saved and a state of step {step}; expected a later "
            "one. load_state goes on from what is saved there; another loop needs another folder."
        )
    with Checkpoints(folder, keep, asynchronous=False, look=False) as checkpoints:
        checkpoints.save(state, {_STATE: _describe_arrays(state)})


def _check_folder(folder: str | Path) -> Path:
    """Raises `UserError` for a file, or a folder of steps, in place of a custom loop's folder."""
    folder = Path(folder)
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: found a file; expected the folder of save_state: name that.")
    for path in (folder, folder.parent):
        if path.name == CHECKPOINTS and saved_steps(path.parent):
            raise UserError(
                f"{folder}: found steps of {path.parent}; expected the folder of save_state: name "
                "that."
            )
    return folder


def load_state(folder: str | Path, step: Step) -> TrainState | None:
    """Loads the newest state of `save_state` in `folder` onto the devices of `step`; None without.

    Arrays are placed as `step` needs them, whatever devices they were saved from. A damaged step is
    moved aside, and the previous one is loaded. Raises `UserError` for a file or a folder of steps,
    and for the state of another student or optimizer, naming the first array that differs;
    `CheckError` if no step is intact.

        state = kdjax.load_state("runs/own", step) or step.init(student.params)
    """
    folder = _check_folder(folder)
    check_kind("step", step, Step, "what kdjax.make_step returns")
    if not saved_steps(folder):
        return None
    with Checkpoints(folder, keep=2, asynchronous=False) as checkpoints:
        latest = checkpoints.latest()
        assert latest is not None  # else opening raises
        _log.info("resuming %s from step %d, saved %s", folder, latest, saved_when(folder, latest))
        saved = saved_run(folder, latest).get(_STATE)
        if saved is None:
            raise UserError(
                f"{folder} holds a run of kdjax train; expected what kdjax.save_state saved. "
                "kdjax.load opens its student."
            )
        wanted = _describe_arrays(step.abstract)
        if differing := sorted(n for n in saved | wanted if saved.get(n) != wanted.get(n)):
            name = differing[0]
            was, now = (x.get(name, "no such array") for x in (saved, wanted))
            raise UserError(
                f"{folder}: found in step {latest} {name}: {was}; expected {now}. It is the state "
                "of another student or optimizer: make the step as it was, or name another folder."
            )
        return checkpoints.restore(latest, step.abstract, step.shardings)


def _describe_arrays(state: TrainState) -> dict[str, str]:
    """Names, shapes and types of the arrays of a state, such as `float32 [24, 896]`."""
    leaves = jax.tree.leaves_with_path(state)
    return {array_name(path): f"{x.dtype} {list(x.shape)}" for path, x in leaves}


def _quiet_threads() -> Callable[[], None]:
    """Silences saving threads about an error that `save` or `wait` raises as well.

    Returns the context to close at the end.

    Orbax logs the error in each of its threads. TensorStore's threads call the hook for results
    that they cannot deliver to an event loop that the first error has closed.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in Path(record.pathname).parts)

    def print_news(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            hook(raised)

    def restore() -> None:
        log.removeFilter(is_news)
        sys.unraisablehook = hook

    log.addFilter(is_news)
    sys.unraisablehook = print_news
    return restore


def checksums(state: Params | TrainState) -> dict[str, int]:
    """Checksums every array of a tree, by name; computes them where the arrays are."""
    arrays = {array_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    placed = {name: x for name, x in arrays.items() if isinstance(x, jax.Array)}
    sums = jax.device_get(_add_up_all(placed))
    return {
        name: int(sums[name]) if name in sums else checksum(np.asarray(x))
        for name, x in arrays.items()
    }


@jax.jit
def _add_up_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: add_up(array) for name, array in arrays.items()}


def _set_aside_damaged(workdir: Path) -> None:
    """Moves damaged steps out of `checkpoints/` until the newest is intact.

    Raises `CheckError` if none is, and moves nothing then.
    """
    damaged: dict[int, DamagedError] = {}
    for step in reversed(saved_steps(workdir)):
        error = find_damage(workdir, step)
        if error is None:
            break
        damaged[step] = error
    else:
        if damaged:
            lines = "\n  ".join(f"step {step}: {e.problem}" for step, e in damaged.items())
            raise CheckError(
                f"{workdir} holds no intact checkpoint:\n  {lines}\n"
                "Nothing was changed. Put a copy of one back, or use another workdir to begin "
                "anew."
            )
    for step, error in damaged.items():
        aside = _free_name(workdir / f"damaged-{step}")
        os.rename(step_folder(workdir, step), aside)
        (aside / "error.txt").write_text(f"{error.details or error.problem}\n")
        _log.warning("step %d is damaged: %s. It is kept as %s", step, error.problem, aside)
    if damaged:
        _log.warning("the newest intact checkpoint is of step %d", saved_steps(workdir)[-1])


def _free_name(path: Path) -> Path:
    """Returns `path`, with the first unused number appended if it exists."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def changed_tensors(
    saved: Iterable[tuple[str, np.ndarray]],
    table: TensorTable,
    spec: ArchSpec,
    *,
    init: str,
    seed: int,
    begun: Params | None = None,
) -> dict[str, bool]:
    """Whether each tensor differs from its initial value; layers of a stack count separately.

    `saved` is what `saved_params` returns. `init`, `seed`: the run's `student.init`, `train.seed`;
    `begun`: the initial values of a run that trained adapters or a block.
    Raises `UserError` for a parameter that the student does not have, or has in another shape.
    """
    slack = _REDRAWN if init == "random" else 0.0
    start = _params_before_training(table, spec, init, seed)
    if begun is not None:
        first = flatten_dict(begun, sep="/")
        start = lambda name: np.asarray(first[name])  # noqa: E731
    changed = {}
    for name, final in saved:
        before = start(name)
        if before.shape != final.shape:
            raise UserError(f"{name} has shape {final.shape}, in the student {before.shape}")
        parts = [(name, before, final)]
        if name.partition("/")[0] in STACKS:
            pairs = zip(before, final, strict=True)
            parts = [(f"{name}[{layer}]", *pair) for layer, pair in enumerate(pairs)]
        for part, old, new in parts:
            if slack:
                changed[part] = not np.allclose(old, new, rtol=slack, atol=slack * 1e-3)
            else:
                changed[part] = not np.array_equal(old, new)
    return changed


def _params_before_training(
    table: TensorTable, spec: ArchSpec, init: str, seed: int
) -> Callable[[str], np.ndarray]:
    """The student's parameters before the first step, by name, each loaded on demand."""
    if init == "random":
        draw = functools.partial(initialise, spec, Compute(), seed)
        drawn = flatten_dict(jax.jit(draw)(), sep="/")
        return lambda name: np.asarray(drawn[name])
    mesh = make_local_mesh(1)
    shapes = flatten_dict(functional(spec, Compute())[1], sep="/")

    def load(name: str) -> np.ndarray:
        if name not in shapes:
            raise UserError(f"{name} is not a parameter of the student")
        tree = load_params(table, spec, unflatten_dict({name: shapes[name]}, sep="/"), mesh)
        return np.asarray(flatten_dict(tree, sep="/")[name])

    return load


def is_finished(latest: int | None, config: Config, workdir: Path) -> bool:
    """Whether the newest step (None: no step) is the run's last and evaluated: nothing is left.

    Raises `UserError` for a smoke run over a checkpoint: it starts from the student's file.
    """
    if config.smoke.steps and latest is not None:
        raise UserError(
            f"{workdir} holds a checkpoint at step {latest}; a smoke run (smoke.steps) starts from "
            "the student's file and saves nothing. Use another workdir, or set "
            "smoke.steps=0 to resume the run."
        )
    steps, seconds = config.train.steps, config.train.seconds
    if latest is None or (latest < steps and not seconds):
        return False
    record = saved_run(workdir, latest)
    return (latest == steps or Clock.has_ended(record)) and UNJUDGED not in record
