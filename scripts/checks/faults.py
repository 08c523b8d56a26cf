"""Tries what a run survives: kills, damage, a second process, full disks, bad headers.

    python -m scripts.checks.faults              # all of it: about ten minutes of two cores
    python -m scripts.checks.faults --short      # as CI does
    python -m scripts.checks.faults --only=kills

Prints the Markdown table of docs/robustness.md. Random models and a few steps: what is tried is the
path, not the figures. Every process is forked from this one, which has imported kdjax and started
no device. Exit status 1 if anything was lost or a traceback was printed.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from kdjax.commands.parsing import log_to_terminal
from kdjax.config import Config
from kdjax.data import teacher_cache
from kdjax.errors import (
    BAD_INPUT,
    NOT_WRITTEN,
    KdjaxError,
    print_error,
    status_of,
)
from kdjax.evaluation.sandbox import BUBBLEWRAP
from kdjax.formats import open_table
from kdjax.formats.saved import CHECKPOINTS, CHECKSUMS, find_damage, saved_steps, step_folder
from kdjax.models.checkpoint import open_checkpoint
from kdjax.recipes import tiny
from kdjax.training.caching import cache_teacher
from kdjax.training.hooks import Hook
from kdjax.training.inputs import prepare
from kdjax.training.job import assemble
from kdjax.training.saving import Checkpoints
from kdjax.training.teachers import CachedTopK
from kdjax.watch.report import ReportPage
from kdjax.watch.run import distill
from scripts.bench.synthetic import write_tiny_pair, write_tiny_text
from scripts.checks import sandbox_attacks as attacks

STEPS = 8
WAYS = ("cut short", "emptied", "deleted", "one bit flipped", "random bytes")


class Row(NamedTuple):
    """One kind of fault."""

    fault: str
    tries: int
    outcome: str
    problems: list[str]


class Child:
    """A forked process that runs `work`; what it says goes to a file."""

    def __init__(self, work: Callable[[], Any], log: Path):
        self.log, self.status = log, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            log_to_terminal()
            status = 0
            try:
                work()
            except (KdjaxError, OSError) as error:
                print_error(error)
                status = status_of(error)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> bool:
        """Whether it still runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait(self, seconds: float, until: Callable[[], Any] = lambda: False) -> None:
        """Waits for its end, for so long or until something is so."""
        deadline = time.monotonic() + seconds
        while self.poll() and time.monotonic() < deadline and not until():
            time.sleep(0.002)

    def kill(self) -> None:
        """`kill -9`, if it still runs."""
        if self.poll():
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)


class Bench:
    """A folder with models, text and the run that nothing disturbed.

    `short` draws no page: two seconds of a processor for each run that ends.
    """

    def __init__(self, folder: Path, seed: int, minutes: float, short: bool = False):
        self.folder, self.random, self.count = folder, random.Random(seed), 0
        self.minutes = minutes
        text = folder / "text"
        write_tiny_pair(folder)
        write_tiny_text(text, [12] * 12)
        self.config = tiny(Config())
        config = self.config
        config.teacher.path, config.student.path = (
            str(folder / f"{name}.gguf") for name in ("teacher", "student")
        )
        config.data.train, config.data.cache_dir = str(text), str(folder / "rows")
        config.data.seq_len, config.train.microbatches = 32, 1
        config.train.steps, config.eval.every, config.checkpoint.every = STEPS, 4, 1
        config.eval.samples, config.log.tensorboard = 0, False
        self.straight, self.draws = folder / "straight", not short
        began = time.monotonic()
        first = self.train(self.straight)
        first.wait(300)
        assert first.status == 0, first.log.read_text()
        self.seconds = time.monotonic() - began
        self.curve = read_curve(self.straight)
        self.checksums = read_checksums(self.straight)

    def fork(self, work: Callable[[], Any]) -> Child:
        """A process of its own."""
        self.count += 1
        return Child(work, self.folder / f"{self.count:04}.log")

    def ask(self, work: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Runs `work` in a process of its own; returns its JSON, or what that process said."""
        report = self.folder / "report.json"
        child = self.fork(lambda: report.write_text(json.dumps(work())))
        child.wait(900)
        child.kill()
        if child.status != 0:
            return None, [child.log.read_text()[-500:]]
        return json.loads(report.read_text()), []

    def train(self, workdir: Path) -> Child:
        """A process that trains, or goes on, in `workdir`."""

        def work() -> None:
            if not self.draws:
                ReportPage.train_end = Hook.train_end
            distill(self.config, workdir)
            if damage := find_damage(workdir, STEPS):
                raise damage

        return self.fork(work)

    def differences(self, workdir: Path) -> list[str]:
        """In what a finished run differs from the one that nothing disturbed."""
        problems = []
        if read_curve(workdir) != self.curve:
            problems.append(f"{workdir.name}: another curve")
        if read_checksums(workdir) != self.checksums:
            problems.append(f"{workdir.name}: other parameters or moments")
        return problems


def read_curve(workdir: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, less the speed."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def read_checksums(workdir: Path) -> dict[str, int]:
    """Checksums of every array of the newest step, which `find_damage` has compared.

    From the file itself: TensorStore, once used here, would allow no fork.
    """
    step = step_folder(workdir, saved_steps(workdir)[-1])
    return json.loads((step / "run" / "metadata").read_text())[CHECKSUMS]


def try_kills(bench: Bench, short: bool) -> Iterator[Row]:
    """`kill -9` at random moments of a run; every other one while a step is being saved."""
    wanted, killed, saving, runs, problems = 2 if short else 100, 0, 0, 0, []
    bound = time.monotonic() + 60 * bench.minutes
    while killed < wanted and time.monotonic() < bound:
        workdir, runs = bench.folder / f"killed-{runs}", runs + 1
        while True:
            before = saved_steps(workdir)
            child = bench.train(workdir)
            if killed >= wanted or time.monotonic() > bound:
                child.wait(300)
            elif killed % 2:
                child.wait(bench.random.uniform(0, bench.seconds))
            else:
                skipped = bench.random.randrange(3)
                seen: set[str] = set()

                child.wait(300, functools.partial(is_saving, workdir, seen, skipped))
                time.sleep(bench.random.uniform(0, 0.2))
            ended = not child.poll()
            child.kill()
            if ended:
                if child.status:
                    problems.append(f"status {child.status}: {child.log.read_text()[-300:]}")
                break
            killed += 1
            saving += bool(unfinished(workdir))
            if before and saved_steps(workdir)[-1] < before[-1]:
                problems.append(f"{workdir.name}: step {before[-1]} was lost")
        problems += bench.differences(workdir) if not problems else []
        if problems:
            break
    outcome = (
        f"{saving} of them left half a save; {runs} runs ended with the curve and the parameters "
        "of one that was never killed, bit for bit"
    )
    yield Row("`kill -9` at a random moment of a run", killed, outcome, problems)


def is_saving(workdir: Path, seen: set[str], skipped: int) -> bool:
    """Whether a save is under way, after as many others; `seen` is kept between calls."""
    seen |= {path.name for path in unfinished(workdir)}
    return len(seen) > skipped


def unfinished(workdir: Path) -> list[Path]:
    """Saves that are not complete."""
    return list((workdir / CHECKPOINTS).glob("*.orbax-checkpoint-tmp*"))


def damage(path: Path, way: str, draw: random.Random) -> None:
    """Damages a file."""
    data = bytearray(path.read_bytes())
    if way == "cut short":
        path.write_bytes(data[: draw.randrange(max(len(data), 1))])
    elif way == "emptied":
        path.write_bytes(b"")
    elif way == "deleted":
        path.unlink()
    elif way == "one bit flipped":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    else:
        path.write_bytes(draw.randbytes(len(data)))


def try_damage(bench: Bench, short: bool) -> Iterator[Row]:
    """Every file of the newest step, damaged in every way, then resumed from."""
    newest = bench.straight / CHECKPOINTS / str(STEPS)
    files = sorted(path for path in newest.rglob("*") if path.is_file())

    def restore_all() -> list[tuple[str, str]]:
        job = assemble(bench.config, bench.straight)

        def restore(workdir: Path) -> tuple[int, Any]:
            moved = dataclasses.replace(job, workdir=workdir)
            with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
                state = moved.restore(checkpoints)
            position = moved.source.get_state()
            return int(state.step), (jax.tree.map(np.asarray, state), position)

        older = bench.folder / "older"
        shutil.copytree(bench.straight, older)
        shutil.rmtree(older / CHECKPOINTS / str(STEPS))
        truth = dict([restore(bench.straight), restore(older)])
        found: list[tuple[str, str]] = []
        for path in files[:: 6 if short else 1]:
            for way in WAYS:
                copy = bench.folder / "damaged"
                shutil.copytree(bench.straight, copy)
                damage(copy / path.relative_to(bench.straight), way, bench.random)
                step, (state, position) = restore(copy)
                same = jax.tree.map(np.array_equal, state, truth[step][0])
                if not jax.tree.all(same) or position != truth[step][1]:
                    found.append((way, "wrong"))
                elif step != STEPS and not (copy / f"damaged-{STEPS}").is_dir():
                    found.append((way, "lost"))
                else:
                    found.append((way, "same" if step == STEPS else "older"))
                shutil.rmtree(copy)
        return found

    answer, failed = bench.ask(restore_all)
    if failed:
        yield Row("a damaged checkpoint", 0, "", failed)
        return
    found = Counter(map(tuple, answer))
    for way in WAYS:
        same, older = found[way, "same"], found[way, "older"]
        bad = found[way, "wrong"] + found[way, "lost"]
        outcome = (
            f"{older} times named, kept aside and the step before resumed; {same} times the file "
            "did not matter: the same state, bit for bit"
        )
        problems = [f"{way}: {bad} times another state, or a step not kept"] if bad else []
        yield Row(f"a file of the newest checkpoint {way}", same + older + bad, outcome, problems)


def try_two(bench: Bench, short: bool) -> Iterator[Row]:
    """A second process in the workdir of a live one."""
    tries, problems = 1 if short else 5, []
    for number in range(tries):
        workdir = bench.folder / f"two-{number}"
        first = bench.train(workdir)
        first.wait(300, lambda workdir=workdir: unfinished(workdir))
        second = bench.train(workdir)
        second.wait(300)
        said = second.log.read_text()
        if second.status != BAD_INPUT or f"is in use by process {first.pid} on " not in said:
            problems.append(f"the second ended with {second.status}: {said[-300:]}")
        first.wait(300)
        first.kill()
        problems += bench.differences(workdir) if first.status == 0 else ["the first one failed"]
    outcome = "the second is told who works there and ends with 2; the first ends as if alone"
    yield Row("two processes in one workdir", tries, outcome, problems)


def try_caches(bench: Bench, short: bool) -> Iterator[Row]:
    """`kill -9` of who packs rows, and of who writes a teacher's cache."""
    config = dataclasses.replace(bench.config, data=dataclasses.replace(bench.config.data))
    pair = bench.folder / "student.gguf"

    def pack(folder: Path) -> None:
        from kdjax.models.tokenizer import load_tokenizer

        config.data.cache_dir = str(folder)
        prepare(config.data, load_tokenizer(str(pair)))

    def write(folder: Path) -> None:
        teacher_cache.SHARD_BYTES = 20_000
        config.data.cache_dir = str(bench.folder / "rows")
        cache_teacher(config, folder, CachedTopK(16))

    wanted = 2 if short else 20
    for what, work in (("packs rows", pack), ("writes a teacher's cache", write)):
        name, problems, killed = work.__name__, [], 0
        began = time.monotonic()
        fresh = bench.fork(lambda work=work, name=name: work(bench.folder / f"{name}-fresh"))
        fresh.wait(300)
        seconds = time.monotonic() - began
        bound, folder = time.monotonic() + 300, bench.folder / f"{name}-killed"
        while killed < wanted and time.monotonic() < bound:
            child = bench.fork(lambda work=work, folder=folder: work(folder))
            child.wait(bench.random.uniform(0.3, 1) * seconds)
            killed += child.poll()
            ended = not child.poll()
            child.kill()
            if ended:
                problems += contents_differ(folder, bench.folder / f"{name}-fresh")
                shutil.rmtree(folder)
        child = bench.fork(lambda work=work, folder=folder: work(folder))
        child.wait(300)
        problems += contents_differ(folder, bench.folder / f"{name}-fresh")
        outcome = "continued or made again, byte for byte as by one never killed; nothing else left"
        yield Row(f"`kill -9` of a process that {what}", killed, outcome, problems)


def contents_differ(folder: Path, fresh: Path) -> list[str]:
    """Files that two folders do not have alike."""

    def read(root: Path) -> dict[str, bytes]:
        files = (path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    ours, theirs = read(folder), read(fresh)
    names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    return [f"{folder.name}: {', '.join(names[:3])} differ"] if names else []


def try_full_disk(bench: Bench, short: bool) -> Iterator[Row]:
    """A disk that fills up at random moments of a run, and has room again at the next start."""
    disk, wanted, filled, late, problems = bench.folder / "disk", 1 if short else 10, 0, 0, []
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield Row("a disk that fills in the middle of a run", 0, "not tried: no right to mount", [])
        return
    workdir, filler = disk / "run", disk / "filler"
    try:
        while filled < wanted and late < 5 * wanted and not problems:
            child, seen = bench.train(workdir), set[str]()
            if filled % 2:
                child.wait(bench.random.uniform(0.2, 0.9) * bench.seconds)
            skipped = bench.random.randrange(STEPS - 3)
            child.wait(300, functools.partial(is_saving, workdir, seen, skipped))
            fill(filler)
            child.wait(300)
            child.kill()
            filler.unlink()
            said = child.log.read_text()
            if child.status == NOT_WRITTEN:
                filled += 1
                problems += [] if "checkpoint" in said else [f"no checkpoint is named: {said}"]
            elif child.status == 0:  # all was written before
                late += 1
            else:
                problems.append(f"status {child.status}: {said[-300:]}")
            again = bench.train(workdir)
            again.wait(300)
            problems += bench.differences(workdir) if again.status == 0 else [again.log.read_text()]
            shutil.rmtree(workdir)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    outcome = (
        "one message, the last good checkpoint named, status 74; with room again the same command "
        "ends with the curve and the parameters of a run that had room, bit for bit"
    )
    yield Row("a disk that fills in the middle of a run", filled, outcome, problems)


def fill(path: Path) -> None:
    """Writes zeros until the disk has no block left."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(512)):
            pass


def try_headers(bench: Bench, short: bool) -> Iterator[Row]:
    """GGUF headers with bytes, numbers or an end that they should not have."""
    wanted = 100 if short else 10_000

    def open_all() -> Counter[str]:
        path, whole = bench.folder / "mutated.gguf", (bench.folder / "student.gguf").read_bytes()
        table = open_table(bench.folder / "student.gguf")
        header = min(table.start(name) for name in table)  # type: ignore[attr-defined]
        found: Counter[str] = Counter()
        for _ in range(wanted):
            data = bytearray(whole)
            for _ in range(bench.random.randint(1, 4)):
                mutate_header(data, header, bench.random)
            path.write_bytes(data)
            try:
                open_checkpoint(path)
            except KdjaxError:
                found["refused"] += 1
            else:
                found["opened"] += 1
        return found

    found, failed = bench.ask(open_all)
    if failed:
        yield Row("a mutated GGUF header", 0, "", failed)
        return
    opened, refused = found.get("opened", 0), found.get("refused", 0)
    outcome = f"{refused} refused in one message, {opened} made a model: what changed was text"
    yield Row("a mutated GGUF header", opened + refused, outcome, [])


def mutate_header(data: bytearray, header: int, draw: random.Random) -> None:
    """Changes a byte, eight bytes or the end of the file's first `header` bytes."""
    at = draw.randrange(min(header, len(data)))
    way = draw.randrange(8)
    if way == 0:
        del data[at + 1 :]
    elif way < 4:
        data[at] = draw.randrange(256)
    else:
        number = draw.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, draw.getrandbits(64)])
        data[at : at + 8] = number.to_bytes(8, "little")[: len(data) - at]


def try_sandbox(_: Bench, short: bool) -> Iterator[Row]:
    """Programs that want to pass without solving anything, and programs that want out."""
    if attacks.permitted(BUBBLEWRAP):
        return
    forgers, ways = list(attacks.FORGERS), list(attacks.ATTACKS)
    if short:  # tests/test_sandbox.py tries all of them
        forgers, ways = forgers[:3], ways[:3]
    ends = {name: attacks.try_forger(attacks.FORGERS[name], BUBBLEWRAP) for name in forgers}
    passed = [f"{name} passed" for name, end in ends.items() if end.passed]
    yield Row("a program that forges its verdict, within bubblewrap", len(ends), "fails", passed)
    reached = [f"{name} got through" for name in ways if attacks.attack(name, BUBBLEWRAP)[0]]
    yield Row("a program that tries to get out of bubblewrap", len(ways), "held", reached)


TRIALS = {
    "kills": try_kills,
    "damage": try_damage,
    "two": try_two,
    "caches": try_caches,
    "disk": try_full_disk,
    "headers": try_headers,
    "sandbox": try_sandbox,
}


def main() -> int:
    """Runs the trials; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--only", choices=tuple(TRIALS), help="one kind")
    parser.add_argument("--seed", type=int, default=0)
    text = "for the 100 kills of a run; fewer are tried if it is too short"
    parser.add_argument("--minutes", type=float, default=12, help=text)
    options = parser.parse_args()
    began, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="kdjax-faults-") as name:
        bench = Bench(Path(name), options.seed, options.minutes, options.short)
        print("| fault | how often | what happened |\n| --- | --- | --- |")
        for trial in [options.only] if options.only else TRIALS:
            for row in TRIALS[trial](bench, options.short):
                failed |= bool(row.problems)
                outcome = "**" + "; ".join(row.problems) + "**" if row.problems else row.outcome
                print(f"| {row.fault} | {row.tries} | {outcome} |", flush=True)
        logs = sorted(bench.folder.glob("*.log"))
        loud = [log for log in logs if "Traceback" in log.read_text(errors="replace")]
        failed |= bool(loud)
        for log in loud[:3]:
            print(log.read_text()[-3000:], file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"\n{len(loud)} of {len(logs)} processes printed a traceback; {seconds:.0f} s.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
