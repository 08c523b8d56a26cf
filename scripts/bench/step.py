"""Times the training step, kdjax's variants and PyTorch's side by side; prints Markdown tables.

    python -m scripts.bench.step --folder=/tmp/m --variants=dequant,q4k,torch-compile
    python -m scripts.bench.step --variants=dequant --sweep-length=512,2048,8192
    python -m scripts.bench.step --variants=dequant --document-tokens=50:2000
    python -m scripts.bench.step --variants=fp8-fast,torch-compile --devices=1,2 --rounds=3
    python -m scripts.bench.step --teacher=demo-teacher --student=demo-student --rows=2 \\
        --length=128 --dtype=float32 --variants=dequant-fast,torch-compile --rounds=3

Each variant runs in a process of its own, so that peaks do not mix and one that fails leaves the
others. A variant is a name of VARIANTS or TORCH; fields may follow, as in
`q4k:loss.chunk_tokens=512:student.remat=dots`. Models are random Q4_K_M files of the given shapes,
made in the folder if they are not there, or GGUF files of one's own. Rates of arithmetic count
teacher forward (not of a cached one), student forward and backward once, and stand beside the rate
of a plain product in the same run.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models.arch import ArchSpec, spec_from_table
from scripts.bench.peer import MODES
from scripts.bench.program import Request, configured
from scripts.bench.rows import ids_of
from scripts.bench.synthetic import (
    GEMMA3_SHAPES,
    QWEN3_SHAPES,
    QWEN25_SHAPES,
    ModelShape,
    write_random_gguf,
)

# name: fields of kdjax/config.py. A new variant is a line here.
VARIANTS: dict[str, dict[str, Any]] = {
    "dequant": {"teacher.backend": "dequant"},
    "dequant-bf16moments": {"teacher.backend": "dequant", "optim.moment_dtype": "bfloat16"},
    "dequant-fast": {"teacher.backend": "dequant", "student.remat": "none"},
    "fp8": {"teacher.compute": "fp8"},
    "fp8-fast": {"teacher.compute": "fp8", "student.remat": "none"},
    "q4k": {"teacher.backend": "q4k"},
    "q4k-fast": {"teacher.backend": "q4k", "student.remat": "none"},
    "q4k-bf16moments": {"teacher.backend": "q4k", "optim.moment_dtype": "bfloat16"},
    "q4k-lean": {
        "teacher.backend": "q4k",
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
TORCH = {f"torch-{mode}": mode for mode in MODES}

# The pair of configs/demo.py: 14.3 and 2.4 million parameters.
DEMO_SHAPES = {
    "demo-teacher": ModelShape("demo-teacher", 4, 512, 8, 2, 1536, 4352, tied=True),
    "demo-student": ModelShape("demo-student", 4, 192, 6, 2, 512, 4096, tied=True),
}
SHAPES = QWEN25_SHAPES | QWEN3_SHAPES | GEMMA3_SHAPES | DEMO_SHAPES
ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the training step.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/bench"), help="for model files and logs")
    add("--teacher", default="7b", help="a known shape, or a file")
    add("--student", default="0.5b")
    add("--variants", default="dequant,q4k,q4k-lean,torch-compile", help="joined by commas")
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
    add("--strong", action="store_true", help="the same rows over all devices together")
    add("--timeout", type=int, default=900, help="seconds for one process")
    add("--json", type=Path, help="where to write the figures")
    parser.set_defaults(count=0)  # of devices that a process may see; 0: all
    return parser.parse_args(argv)


def model_file(shape: str, folder: Path) -> Path:
    """The file of a known shape, written if it is not there, or the file that is named."""
    path = folder / f"{shape}.gguf" if shape in SHAPES else Path(shape)
    if not path.exists() and shape in SHAPES:
        aside = path.with_suffix(".partial")
        write_random_gguf(aside, SHAPES[shape])
        aside.rename(path)
    return path


def settings_of(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """A kdjax variant's config fields by name, defaults of the command below its own."""
    name, *own = variant.split(":")
    settings: dict[str, Any] = {
        "teacher.path": str(model_file(args.teacher, args.folder)),
        "student.path": str(model_file(args.student, args.folder)),
        "student.init": "random",
        "student.remat": "full",
        "teacher.param_dtype": args.dtype,
        "train.compute_dtype": args.dtype,
        "train.batch_size": args.rows * rows_factor(args),
        "data.max_segments": args.segments,
    }
    return settings | VARIANTS[name] | dict(pair.split("=", 1) for pair in [*args.set, *own])


def rows_factor(args: argparse.Namespace) -> int:
    """How often `--rows` the global batch is: once a device, or once."""
    return 1 if args.strong else max(args.count, 1)


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
    )
    return dataclasses.asdict(request) | changes


@functools.cache
def spec_of(path: Path) -> ArchSpec:
    """The sizes of a model; a header with 151,936 tokens is not read twice."""
    return spec_from_table(open_table(path))


def torch_request(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    specs = {
        part: dataclasses.asdict(spec_of(model_file(shape, args.folder)))
        for part, shape in (("teacher", args.teacher), ("student", args.student))
    }
    vocab = ids_of(specs["student"]["vocab_size"])
    made = dict(vocab=vocab, rows=args.rows * rows_factor(args), lengths=lengths(args))
    of = configured(settings_of("dequant", args)).loss
    loss = dict(temperature=of.temperature, alpha=of.alpha, chunk_tokens=2048)
    return specs | made | loss | dict(mode=TORCH[variant], dtype=args.dtype, steps=args.steps)


def lengths(args: argparse.Namespace) -> list[int]:
    """Ascending, because a process's peak only grows."""
    if args.sweep_length:
        return sorted(int(part) for part in args.sweep_length.split(","))
    return [args.length]


def run(
    script: str, request: dict[str, Any], name: str, args: argparse.Namespace, cache: str = ""
) -> list[dict[str, Any]]:
    """Rows that `scripts.bench.<script>` gave in a process of its own, or one with `error`."""
    log = args.folder / f"{name.replace('/', '_')}.log"
    inherited = {k: v for k, v in os.environ.items() if k != "KDJAX_TEACHER_BACKEND"}
    environment = (
        inherited
        | visible(args.count)
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
        try:
            code = subprocess.run(
                command, stdout=output, stderr=output, timeout=args.timeout, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {args.timeout} s"
        if code == 0 and answer.exists():
            about = {"program": name} | ({"devices": args.count} if args.count else {})
            return [row | about for row in json.loads(answer.read_text())]
    said = [line for line in log.read_text().splitlines() if line.strip()] or ["nothing"]
    return [{"program": name, "error": f"status {code}, {said[-1][:300]} ({log})"}]


def visible(count: int) -> dict[str, str]:
    """Variables that show a process the first `count` devices; 0: all."""
    if not count:
        return {}
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


def why_not(variant: str, args: argparse.Namespace) -> str:
    """Why PyTorch's variants cannot run here; empty if they can."""
    look = "import torch, transformers; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
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
    tables = [(STEP_TABLE, good), (HOST_TABLE, hosts)]
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


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        variants = check(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    for shape in (args.teacher, args.student):
        model_file(shape, args.folder)
    asked = dataclasses.asdict(Request({"train.compute_dtype": args.dtype}, [], matmul=args.matmul))
    (rate,) = run("program", asked, "matmul", args)
    product = rate.get("matmul_flops")
    print(rate.get("devices", rate.get("error")))
    if product:
        print(f"a {args.matmul}^3 {args.dtype} product: {product / 1e12:.4g} TFLOP/s", flush=True)
    counts = [int(part) for part in args.devices.split(",")] if args.devices else [0]
    cases = list(itertools.product(variants, counts))
    rounds: dict[tuple[str, int], list[list[dict[str, Any]]]] = {case: [] for case in cases}
    rows: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for variant, args.count in cases:
            start = time.perf_counter()
            rounds[variant, args.count].append(measure(variant, args))
            took = time.perf_counter() - start
            for row in rounds[variant, args.count][-1]:
                speed = row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"
                where = f" on {args.count}" if args.count else ""
                print(f"{row['program']}{where}: {speed} ({took:.0f} s)", flush=True)
            rows = [row for found in rounds.values() if found for row in middle(found)]
            add_rates(rows, product, args)
            if args.json:  # now, so that a command that is cut short keeps what it measured
                settings = {k: str(v) for k, v in vars(args).items()}
                document = dict(
                    devices=rate.get("devices"), matmul_flops=product, settings=settings, rows=rows
                )
                args.json.write_text(json.dumps(document, indent=1))
    print("\n" + report(rows))
    return 1 if any("error" in row and row["program"] not in TORCH for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
