"""Times the training step, kdjax's variants and PyTorch's side by side; prints Markdown tables.

    python -m scripts.bench.step --folder=/tmp/m --variants=dense,packed,torch-compile
    python -m scripts.bench.step --variants=dense --sweep-length=512,2048,8192
    python -m scripts.bench.step --variants=dense --document-tokens=50:2000
    python -m scripts.bench.step --variants=float8-fast,torch-compile --devices=1,2 --rounds=3
    python -m scripts.bench.step --scaling --devices=1,2,4,8 --limit=590 --json=/tmp/m/scaling.json
    python -m scripts.bench.step --teacher=demo-teacher --student=demo-student --rows=2 \\
        --length=128 --dtype=float32 --variants=dense-fast,torch-compile --rounds=3

Each variant runs in a process of its own, so that peaks do not mix and one that fails leaves the
others. A variant is a name of VARIANTS or TORCH; fields may follow, as in
`packed:loss.chunk_tokens=512:student.remat=dots`. Models are random Q4_K_M files of given shapes,
made in the folder if they are not there, or GGUF files of one's own. Rates of arithmetic count
teacher forward (not of a cached one), student forward and backward once, and stand beside the rate
of a plain product in the same run.

`--scaling` runs the tables of SCALING, the most important first, small numbers of devices side by
side. What `--json` holds already is not run again: the same command goes on after its limit.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.commands.parsing import WEIGHTS_VARIABLES
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models.arch import ArchSpec
from kdjax.models.schema import spec_from_table
from scripts.bench import synthetic
from scripts.bench.peer import MODES
from scripts.bench.program import Request, configured
from scripts.bench.rows import ids_of
from scripts.bench.synthetic import ModelShape, write_random_gguf

# name: fields of kdjax/config.py. A new variant is a line here.
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"teacher.weights": "dense"},
    "dense-bf16moments": {"teacher.weights": "dense", "optim.moment_dtype": "bfloat16"},
    "dense-fast": {"teacher.weights": "dense", "student.remat": "none"},
    "float8": {"teacher.weights": "float8"},
    "float8-fast": {"teacher.weights": "float8", "student.remat": "none"},
    "packed": {"teacher.weights": "packed"},
    "packed-fast": {"teacher.weights": "packed", "student.remat": "none"},
    "packed-bf16moments": {"teacher.weights": "packed", "optim.moment_dtype": "bfloat16"},
    "packed-lean": {
        "teacher.weights": "packed",
        "optim.moment_dtype": "bfloat16",
        "loss.chunk_tokens": 512,
    },
}
for _kind in ("topk", "hidden"):  # the teacher's outputs come with the batch: random records
    VARIANTS[f"cached-{_kind}"] = {
        "student.remat": "none",
        "loss.temperature": 1.0,
        "loss.alpha": 0.0,
    }
# Adapters of rank 16 beside a frozen student (docs/lora.md).
_LORA = {"teacher.weights": "packed", "student.init": "checkpoint", "student.lora.rank": 16}
VARIANTS |= {
    "packed-lora": _LORA,
    "packed-lora-dense": _LORA | {"student.lora.weights": "dense"},
    "packed-lora-float8": _LORA | {"student.lora.weights": "float8"},
}
TORCH = {f"torch-{mode}": mode for mode in MODES}

# The pair of configs/demo.py: 14.3 and 2.4 million parameters.
DEMO_SHAPES = {
    "demo-teacher": ModelShape("demo-teacher", 4, 512, 8, 2, 1536, 4352, tied=True),
    "demo-student": ModelShape("demo-student", 4, 192, 6, 2, 512, 4096, tied=True),
}
SHAPES = synthetic.SHAPES | DEMO_SHAPES

# Of several devices: what each table changes in the defaults of the command.
_TOPK = "cached-topk:loss.chunk_tokens=16384"
SCALING: list[dict[str, Any]] = [
    {
        "variants": f"dense-fast,float8-fast,{_TOPK},torch-compile,packed-fast,"
        "cached-hidden:loss.chunk_tokens=4096"
    },
    {"variants": f"{_TOPK},dense-fast", "whole": True},
    {"variants": "packed:mesh.fsdp={devices}", "teacher": "32b", "student": "7b"},
    {"variants": _TOPK, "strong": 64, "losses": 20, "steps": 8},
    {"variants": "dense-fast", "strong": 64, "steps": 4},
]
ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: list[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """The command's; `defaults` come before its own, behind what it says."""
    parser = argparse.ArgumentParser(description="Times the training step.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/bench"), help="for model files and logs")
    add("--teacher", default="7b", help="a known shape, or a file")
    add("--student", default="0.5b")
    add("--variants", default="dense,packed,packed-lean,torch-compile", help="joined by commas")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every variant")
    add("--rows", type=int, default=8)
    add("--length", type=int, default=2048)
    add("--sweep-length", help="lengths joined by commas, in one process a variant")
    add("--segments", type=int, default=1, help="documents a row (the peer's rows have one)")
    add("--document-tokens", metavar="50:2000", help="also rows of documents of these lengths")
    add("--dtype", default="bfloat16", help="of activations and of the teacher's weights")
    add("--steps", type=int, default=12, help="timed ones, after three more")
    add("--rounds", type=int, default=1, help="all variants in turn, this often; medians")
    add("--host", action="store_true", help="also the loop, the device's idle time, the pipeline")
    add("--startup", action="store_true", help="also with the programs compiled before")
    add("--matmul", type=int, default=8192, help="size of the product for the chip's rate")
    add("--devices", default="", metavar="1,2,4", help="also on so many devices, rows a device")
    add("--strong", type=int, default=0, help="rows of all devices together, by --rows at a time")
    add("--losses", type=int, default=0, help="also those of so many first steps")
    add("--whole", action="store_true", help="each of several devices stores all masters")
    add("--scaling", action="store_true", help="the tables of several devices, with profiles")
    add("--limit", type=int, default=0, help="seconds in which --scaling ends; 0: none")
    add("--timeout", type=int, default=900, help="seconds for one process")
    add("--json", type=Path, help="where to write the figures")
    # Of devices that a process may see, 0: all; and which is the first.
    parser.set_defaults(count=0, first=0, **defaults)
    return parser.parse_args(argv)


def model_file(shape: str, folder: Path, seed: int = 0) -> Path:
    """The file of a known shape, written if it is not there, or the file that is named."""
    path = folder / f"{shape}{f'-{seed}' * bool(seed)}.gguf" if shape in SHAPES else Path(shape)
    if not path.exists() and shape in SHAPES:
        aside = path.with_suffix(".partial")
        write_random_gguf(aside, SHAPES[shape], seed=seed)
        aside.rename(path)
    return path


def student_file(args: argparse.Namespace) -> Path:
    """The student's, of other numbers than those of a teacher of its shape."""
    return model_file(args.student, args.folder, seed=int(args.student == args.teacher))


def settings_of(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """A kdjax variant's config fields by name, defaults of the command below its own."""
    name, *own = variant.split(":")
    rows = batch_rows(args)
    settings: dict[str, Any] = {
        "teacher.path": str(model_file(args.teacher, args.folder)),
        "student.path": str(student_file(args)),
        "student.init": "random",
        "student.remat": "full",
        "teacher.param_dtype": args.dtype,
        "train.compute_dtype": args.dtype,
        "train.batch_size": rows,
        "train.microbatches": max(rows // (args.rows * max(args.count, 1)), 1),
        "data.max_segments": args.segments,
    }
    return settings | VARIANTS[name] | dict(pair.split("=", 1) for pair in [*args.set, *own])


def batch_rows(args: argparse.Namespace) -> int:
    """Rows of a batch: `--rows` a device, or as many as `--strong` says over all together."""
    return args.strong or args.rows * max(args.count, 1)


def kdjax_request(variant: str, args: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    name = variant.split(":")[0]
    kind = name.removeprefix("cached-") if name.startswith("cached-") else ""
    request = Request(
        settings_of(variant, args),
        lengths(args),
        str(args.segments),
        args.steps,
        args.host,
        teacher_cache=kind,
        devices=args.count,
        whole=args.whole,
        losses=args.losses,
        profile=args.scaling,
    )
    return dataclasses.asdict(request) | changes


@functools.cache
def spec_of(path: Path) -> ArchSpec:
    """The sizes of a model; a header with 151,936 tokens is not read twice."""
    return spec_from_table(open_table(path))


def describe_model(path: Path) -> dict[str, Any]:
    """The sizes as `peer.build` takes them."""
    spec = spec_of(path)
    computed = dict(num_layers=spec.num_layers, rope_theta=spec.rope_theta)
    return dataclasses.asdict(spec) | computed


def torch_request(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    specs = {
        part: describe_model(model_file(shape, args.folder))
        for part, shape in (("teacher", args.teacher), ("student", args.student))
    }
    vocab = ids_of(specs["student"]["vocab_size"])
    made = dict(vocab=vocab, rows=batch_rows(args), lengths=lengths(args))
    of = configured(settings_of("dense", args)).loss
    loss = dict(temperature=of.temperature, alpha=of.alpha, chunk_tokens=2048)
    parts = int(configured(settings_of("dense", args)).train.microbatches)
    about = dict(mode=TORCH[variant], dtype=args.dtype, steps=args.steps, microbatches=parts)
    return specs | made | loss | about


def lengths(args: argparse.Namespace) -> list[int]:
    """Ascending, because a process's peak only grows."""
    if args.sweep_length:
        return sorted(int(part) for part in args.sweep_length.split(","))
    return [args.length]


def run(
    script: str, request: dict[str, Any], name: str, args: argparse.Namespace, cache: str = ""
) -> list[dict[str, Any]]:
    """Rows that `scripts.bench.<script>` gave in a process of its own, or one with `error`."""
    count = f" on {args.count}" if args.count else ""
    log = args.folder / f"{name.replace('/', '_')}{count}.log"
    inherited = {k: v for k, v in os.environ.items() if k not in WEIGHTS_VARIABLES}
    environment = (
        inherited
        | visible(args.count, args.first)
        | {
            "JAX_COMPILATION_CACHE_DIR": cache,  # empty: every compile time is a cold one
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")])),
        }
    )
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        asked, answer = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(request))
        launch = [sys.executable]
        if script == "peer" and args.count > 1:
            launch += ["-m", "torch.distributed.run", "--standalone"]
            launch += [f"--nproc_per_node={args.count}"]
        command = [*launch, "-m", f"scripts.bench.{script}", str(asked), str(answer)]
        # A session of its own, of which none is left: what torchrun starts outlives torchrun.
        with subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as process:
            try:
                code = process.wait(args.timeout)
            except subprocess.TimeoutExpired:
                code = f"none after {args.timeout} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if code == 0 and answer.exists():
            about = {"program": name} | ({"devices": args.count} if args.count else {})
            return [row | about for row in json.loads(answer.read_text())]
    said = [line for line in log.read_text().splitlines() if line.strip()] or ["nothing"]
    return [{"program": name, "error": f"status {code}, {said[-1][:300]} ({log})"}]


def visible(count: int, first: int = 0) -> dict[str, str]:
    """Variables that show a process `count` devices, from the `first` of those shown; 0: all."""
    if not count:
        return {}
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + count)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[first : first + count])}


@functools.cache
def ask_torch() -> subprocess.CompletedProcess[str]:
    """A process that imports PyTorch and says whether it finds a GPU."""
    look = "import torch, transformers; print(torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)


def why_not(variant: str, args: argparse.Namespace) -> str:
    """Why PyTorch's variants cannot run here; empty if they can."""
    done = ask_torch()
    if done.returncode:
        return f"{variant}: skipped, {done.stderr.strip().splitlines()[-1]}"
    if "True" not in done.stdout and SHAPES.get(args.teacher, SHAPES["7b"]).hidden > 512:
        return f"{variant}: skipped, PyTorch finds no GPU and {args.teacher} is too large for a CPU"
    return ""


def measure(variant: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one variant: its lengths, its packed rows, its warm start."""
    if variant in TORCH:
        if reason := why_not(variant, args):
            return [{"program": variant, "error": reason}]
        return run("peer", torch_request(variant, args), variant, args)
    script, request = "program", kdjax_request(variant, args)
    if not args.startup:
        rows = run(script, request, variant, args)
    else:
        with tempfile.TemporaryDirectory() as cache:
            rows = run(script, request, variant, args, cache)
            again = request | {"steps": 1, "host": False, "lengths": request["lengths"][:1]}
            rows += run(script, again, f"{variant}, compiled before", args, cache)
    if args.document_tokens:
        most = {"data.max_segments": max(args.segments, 32)}
        one = request | {"settings": request["settings"] | most}
        many = one | {"documents": args.document_tokens}
        for name, asked in (("one document a row", one), (args.document_tokens, many)):
            rows += run(script, asked, f"{variant}, {name}", args)
    return rows


def middle(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One list of rows from several rounds: of each row the round with the median speed."""
    found = []
    most = max(map(len, rounds))  # a round that failed has one row, its error
    for rows in zip(*(r for r in rounds if len(r) == most), strict=True):
        good = sorted((r for r in rows if "error" not in r), key=lambda r: r["step_ms"])
        if not good:
            found.append(rows[0])
            continue
        figure = good[(len(good) - 1) // 2]
        found.append(figure | {"rounds_ms": [round(r["step_ms"], 2) for r in good]})
    return found


def add_rates(rows: list[dict[str, Any]], matmul: float | None, args: argparse.Namespace) -> None:
    """FLOP/s of every row, its share of the plain product's, and the speed over the best peer's."""
    specs = [spec_of(model_file(s, args.folder)) for s in (args.teacher, args.student)]
    first = next((row["losses"] for row in rows if row.get("losses")), [])
    for row in rows:
        if "error" in row:
            continue
        # For kdjax and the peer alike, and without the teacher where it is cached.
        flops = specs[0].forward_flops(row["length"]) + 3 * specs[1].forward_flops(row["length"])
        if row.get("teacher_cache"):
            flops = row["flops_per_token"]
        row["tflops"] = row["tokens_per_s"] * flops / 1e12
        if matmul:
            row["of_matmul"] = row["tflops"] * 1e12 / matmul
        peers = [
            r["tokens_per_s"]
            for r in rows
            if r["program"] in TORCH
            and (r.get("length"), r.get("devices")) == (row["length"], row.get("devices"))
        ]
        if peers:
            row["over_peer"] = row["tokens_per_s"] / max(peers)
        alone = [
            r["tokens_per_s"]
            for r in rows
            if r.get("devices") == 1
            and (r["program"], r.get("length")) == (row["program"], row["length"])
        ]
        if alone and "devices" in row:
            row["of_linear"] = row["tokens_per_s"] / (row["devices"] * alone[0])
        if row.get("losses"):
            row["last_loss"] = row["losses"][-1]
            row["loss_off"] = max(abs(a - b) for a, b in zip(row["losses"], first, strict=True))


# Heading, figure and its form; a table has the columns that a row of it fills.
STEP_TABLE = [
    ("program", "program", ""),
    ("devices", "devices", "d"),
    ("length", "length", "d"),
    ("step, ms", "step_ms", ",.1f"),
    ("processor time, ms", "processor_ms", ",.0f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("of linear", "of_linear", ".3f"),
    ("rounds, ms", "rounds_ms", ""),
    ("TFLOP/s", "tflops", ".4g"),
    ("of the product's rate", "of_matmul", ".2f"),
    ("planned peak, GB", "planned_gb", ".2f"),
    ("peak, GB", "peak_gb", ".2f"),
    ("arguments, GB", "arguments_gb", ".2f"),
    ("temporaries, GB", "temporaries_gb", ".2f"),
    ("load, s", "load_s", ".1f"),
    ("compile, s", "compile_s", ".1f"),
    ("first step, s", "first_step_s", ".1f"),
    ("x best peer", "over_peer", ".2f"),
    ("last of the first losses", "last_loss", ".5f"),
    ("off the first row's, at most", "loss_off", ".1e"),
]
# Of two steps under the profiler, on the first device, a step; "alone": with nothing beside.
PROFILE_TABLE = [
    ("program", "program", ""),
    ("devices", "devices", "d"),
    ("step, ms", "step_ms", ",.1f"),
    ("sums by NCCL, ms", "sums_ms", ".1f"),
    ("alone", "sums_alone_ms", ".1f"),
    ("copies, ms", "copies_ms", ".1f"),
    ("alone", "copies_alone_ms", ".1f"),
    ("idle, ms", "idle_ms", ".1f"),
]
HOST_TABLE = [
    ("program", "program", ""),
    ("steps alone, ms", "bare_ms", ".1f"),
    ("steps in the loop, ms", "loop_ms", ".1f"),
    ("the loop's share", "host_share", ".2%"),
    ("device idle (profile)", "device_idle_share", ".2%"),
    ("pipeline, rows/s", "pipeline_rows_per_s", ",.0f"),
    ("x the step's appetite", "pipeline_over_appetite", ",.0f"),
]


def table(columns: list[tuple[str, str, str]], rows: list[dict[str, Any]]) -> str:
    """Rows of figures as a Markdown table; a figure that a row lacks leaves its cell empty."""
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    lines = [[heading for heading, *_ in columns], ["---"] * len(columns)]
    for row in rows:
        values = [(row.get(name), form) for _, name, form in columns]
        lines.append(["" if value is None else format(value, form) for value, form in values])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(rows: list[dict[str, Any]]) -> str:
    """All tables that the rows fill, as Markdown, and what failed."""
    good = [row for row in rows if "error" not in row]
    hosts = [row for row in good if "host_share" in row]
    profiled = [row for row in good if "idle_ms" in row]
    tables = [(STEP_TABLE, good), (HOST_TABLE, hosts), (PROFILE_TABLE, profiled)]
    parts = [table(columns, filled) for columns, filled in tables if filled]
    return "\n\n".join(parts + [f"{r['program']}: {r['error']}" for r in rows if "error" in r])


def check(args: argparse.Namespace) -> list[str]:
    """The variants asked for. Raises `UserError` for a name that there is not."""
    variants = args.variants.split(",")
    for variant in variants:
        name = variant.split(":")[0]
        if name not in VARIANTS and name not in TORCH:
            raise UserError(f"--variants={name}: must be among {', '.join(VARIANTS | TORCH)}")
    return variants


class Case(NamedTuple):
    """A variant on a number of devices."""

    variant: str
    count: int  # 0: all that there are


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Cases of one table, in its order; raises `UserError` as `check` does."""
    counts = [int(part) for part in args.devices.split(",")] if args.devices else [0]
    cases = [
        Case(variant.replace("{devices}", str(count)), count)
        for variant, count in itertools.product(check(args), counts)
        if count > 1 or "{devices}" not in variant  # one device has nothing to split
    ]
    if args.losses:  # in smaller parts: how far another order of sums moves a loss
        parts = 2 * args.strong // args.rows
        cases.insert(0, Case(f"{args.variants}:train.microbatches={parts}", 1))
    return cases


def groups_of(cases: list[Case], side_by_side: bool) -> Iterator[list[Case]]:
    """Neighbours that together need no more devices than the largest case run at once."""
    most, group = max((case.count for case in cases), default=0), []
    for case in cases:
        if group and not (side_by_side and sum(c.count for c in [*group, case]) <= most):
            yield group
            group = []
        group.append(case)
    if group:
        yield group


def measure_group(group: list[Case], args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Rows of each case, each on devices of its own."""
    firsts = itertools.accumulate((case.count for case in group), initial=0)
    asked = [
        argparse.Namespace(**vars(args) | {"count": case.count, "first": first})
        for case, first in zip(group, firsts, strict=False)
    ]
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(measure, (case.variant for case in group), asked))


def tables_of(argv: list[str] | None) -> list[tuple[str, argparse.Namespace, list[Case]]]:
    """Title, arguments and cases of each table. Raises `UserError` for what cannot be measured."""
    args = arguments(argv)
    if not args.scaling:
        return [("", args, cases_of(args))]
    if not args.devices:
        raise UserError("--scaling needs the numbers of devices, such as --devices=1,2,4,8.")
    tables = []
    for changes in SCALING:
        args = arguments(argv, **changes)
        rows = (
            f"{args.strong} x {args.length} together"
            if args.strong
            else f"{args.rows} x {args.length} a device"
        )
        title = f"{args.teacher} to {args.student}, {rows}"
        title += ", all masters on each" if args.whole else ""
        tables.append((title, args, cases_of(args)))
    return tables


def measure_table(
    args: argparse.Namespace,
    cases: list[Case],
    rows: list[dict[str, Any]],
    deadline: float,
) -> Iterator[list[dict[str, Any]]]:
    """All rows there are after each group of cases, `rows` being those of an earlier command."""
    done = {(row["program"], row.get("devices", 0)) for row in rows}
    rounds = {case: [] for case in cases if case not in done}
    longest = 0.0
    for _ in range(args.rounds):
        for group in groups_of(list(rounds), args.scaling):
            start = time.perf_counter()
            left = deadline - start
            if left < max(longest, 30.0):
                print(f"{left:.0f} s are left: stopped before {group[0]}", flush=True)
                return
            args.timeout = min(args.timeout, left - 5)
            found = measure_group(group, args)
            took = time.perf_counter() - start
            longest = max(longest, took)
            for case, measured in zip(group, found, strict=True):
                rounds[case].append(measured)
                for row in measured:
                    speed = row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"
                    where = f" on {case.count}" if case.count else ""
                    print(f"{row['program']}{where}: {speed} ({took:.0f} s)", flush=True)
            yield rows + [row for made in rounds.values() if made for row in middle(made)]


def main(argv: list[str] | None = None) -> int:
    try:
        tables = tables_of(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    first = tables[0][1]
    deadline = time.perf_counter() + (first.limit or float("inf"))
    first.folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {}
    if first.scaling and first.json and first.json.exists():
        kept = {document["title"]: document for document in json.loads(first.json.read_text())}
    with ThreadPoolExecutor(1) as pool:  # a large model's file is written while others are timed
        made = [pool.submit(make_files, args) for _, args, _ in tables]
        made[0].result()
        asked = dataclasses.asdict(
            Request({"train.compute_dtype": first.dtype}, [], matmul=first.matmul)
        )
        (rate,) = run("program", asked, "matmul", first)
        product = rate.get("matmul_flops")
        print(rate.get("devices", rate.get("error")))
        if product:
            print(
                f"a {first.matmul}^3 {first.dtype} product: {product / 1e12:.4g} TFLOP/s",
                flush=True,
            )
        for (title, args, cases), files in zip(tables, made, strict=True):
            files.result()
            before = [r for r in kept.get(title, {}).get("rows", []) if "error" not in r]
            for rows in measure_table(args, cases, before, deadline):
                add_rates(rows, product, args)
                settings = {k: str(v) for k, v in vars(args).items()}
                kept[title] = dict(
                    title=title,
                    devices=rate.get("devices"),
                    matmul_flops=product,
                    settings=settings,
                    rows=rows,
                )
                if args.json:  # now, so that a command that is cut short keeps what it measured
                    args.json.write_text(json.dumps(list(kept.values()), indent=1))
    found = [row for document in kept.values() for row in document["rows"]]
    for title, document in kept.items():
        print(f"\n{title}\n" if title else "", report(document["rows"]), sep="\n")
    return 1 if any("error" in row and row["program"] not in TORCH for row in found) else 0


def make_files(args: argparse.Namespace) -> None:
    """Those of both models, where they are not there."""
    model_file(args.teacher, args.folder)
    student_file(args)


if __name__ == "__main__":
    sys.exit(main())
