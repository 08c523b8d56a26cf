"""The plan of `kdjax evaluate --plan` against XLA's account of the programs that are run."""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from kdjax.commands import evaluate
from kdjax.device import sharding
from kdjax.device.runtime import Devices
from kdjax.device.sharding import count_bytes
from kdjax.evaluation import drafting, heldout, plan
from kdjax.evaluation.target import open_target
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import COMPARED_CHUNK
from kdjax.models import decoding
from kdjax.models.model import Model
from kdjax.models.nextn import take_block
from kdjax.models.shards import map_rows
from kdjax.models.speculation import BlockWriter
from scripts.bench.synthetic import QWEN25_SHAPES, QWEN35_SHAPES, write_random_gguf

CPU_OF = functools.partial(Devices, "cpu", "cpu", 1, peak_flops=None)
CPU = CPU_OF(None)
PLAIN = QWEN25_SHAPES["tiny-teacher"]._replace(
    layers=3, hidden=384, heads=6, kv_heads=2, head=64, ffn=1024, rows=8000
)
DELTA = QWEN35_SHAPES["tiny-delta-teacher"]._replace(
    layers=4, heads=4, kv_heads=2, head=64, ffn=768, rows=8000, drafts=1, tied=True
)
of = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = PLAIN._replace(layers=2, hidden=256, heads=4, ffn=768)
    periods = DELTA._replace(layers=8, drafts=0)
    shapes = {"plain": PLAIN, "small": small, "delta": DELTA, "periods": periods}
    for name, shape in shapes.items():
        write_random_gguf(folder / f"{name}.gguf", shape, recipe="q8_0")
    return folder


class Held(NamedTuple):
    """Bytes that XLA says a program holds beside its inputs."""

    temporary: int
    output: int

    @classmethod
    def by(cls, lowered):
        used = lowered.compile().memory_analysis()
        return cls(used.temp_size_in_bytes, used.output_size_in_bytes)


def read_text(model, rows, length, drafts=0):
    """The program of `Model.hidden_states`."""
    run = model.functions.hidden
    if drafts:
        run = functools.partial(model.functions.draft_runs, drafts=drafts)
    columns = [of((rows, length), jnp.int32)] * 3
    with model.precision():
        return Held.by(jax.jit(map_rows(run, model.spread)).lower(model.params, *columns))


def compare(models, rows, length):
    """The program of `heldout.compare`: the figures of one model, or of two."""
    width = min(model.vocab_size for model in models)
    spec = HeadSpec(KDLoss(), width, width, chunk_tokens=COMPARED_CHUNK)
    run = jax.jit(functools.partial(heldout.position_values, spec=spec))
    sides = []
    for model in models:
        head = jax.eval_shape(model.functions.head, model.params)
        sides.append((of((rows, length, model.spec.hidden_size), head.dtype), head))
    own, *theirs = sides
    labels = of((rows, length), jnp.int32)
    return Held.by(run.lower(*own, labels, *(x for pair in theirs for x in pair)))


def write(model, sizes):
    """The engine's slots and the weights made ready, and the own of the larger call: steps, or the
    reading of prompts."""
    rows, prompt, answer = sizes
    writer = model.as_writer("generate")
    opened = functools.partial(
        decoding._open, writer=writer, slots=rows, capacity=decoding._room_for(prompt + answer)
    )
    slots = jax.eval_shape(opened, model.params)
    weights = writer.prepare(model.params, rows)
    state = weights, slots, of((), jnp.uint32), of((rows,), bool)
    static = dict(writer=writer, sampling=decoding.Sampling(1, temperature=1.0))
    at_once = decoding.prompts_at_once(rows)
    tokens, lengths = (
        of((at_once, decoding.pad_length(prompt, prompt + answer)), jnp.int32),
        of((at_once,), jnp.int32),
    )
    with model.precision():
        used = Held.by(decoding._advance_on_cpu.lower(model.params, *state, **static))
        read = Held.by(jax.jit(writer.read).lower(model.params, weights, tokens, lengths))
    own = max(used.temporary, read.temporary + read.output)
    return count_bytes(weights) + count_bytes(slots) + own


@pytest.fixture(scope="module")
def opened(paths, mesh):
    """The target of a file in a form, its model and `write` of that model, each made once."""

    @functools.cache
    def open_once(name):
        target = open_target(f"{paths}/{name}")
        model = target.load(mesh)
        return target, model, functools.cache(functools.partial(write, model))

    return open_once


def plan_of(target, teacher, mesh, **asked):
    sides = [
        plan.Loaded(x.checkpoint, x.form.weights, x.form.dtype) if x else None
        for x in (target, teacher)
    ]
    return plan.plan_evaluation(*sides, mesh, CPU, **asked)


def sum_phase(made, name):
    return sum(made.resident.values()) + sum(made.phases[name].values())


@pytest.mark.parametrize("form", ["packed:bfloat16", "dense:float32", "dense:bfloat16"])
@pytest.mark.parametrize(("rows", "length"), [(2, 1024), (8, 192), (16, 64)])
def test_a_model_alone_holds_what_is_planned(opened, mesh, form, rows, length):
    """Long rows hold the pairs of attention, short ones the MLP's columns."""
    (target, model, write), sizes = opened(f"plain.gguf@{form}"), (12, 50, 40)
    made = plan_of(target, None, mesh, written={"it is asked": sizes}, read=(rows, length))
    held = model.resident_bytes
    head = count_bytes(jax.eval_shape(model.functions.head, model.params))
    used = read_text(model, rows, length)
    reading = held + head + 2 * used.output + used.temporary
    comparing = held + head + used.output + compare([model], rows, length).temporary
    assert sum_phase(made, "text is read") == pytest.approx(reading, rel=0.05)
    assert sum_phase(made, "logits are compared") == pytest.approx(comparing, rel=0.05)
    asked = held + write(sizes)
    assert sum_phase(made, "it is asked") == pytest.approx(asked, rel=0.05)


@pytest.mark.parametrize("form", ["packed:float32", "packed:bfloat16", "dense:bfloat16"])
@pytest.mark.parametrize(("name", "prompt"), [("plain", 50), ("plain", 600), ("periods", 50)])
def test_one_row_that_writes_holds_what_is_planned(opened, mesh, name, form, prompt):
    """Weights as narrow as they are stored, and of those that read its prompt one matrix wide, or,
    of layers of two kinds, a period of them."""
    (target, model, write), sizes = opened(f"{name}.gguf@{form}"), (1, prompt, 40)
    kept = target.form.weights, target.form.dtype
    made = plan.plan_text(target.checkpoint, *kept, sizes, mesh, CPU)
    assert made.peak == pytest.approx(model.resident_bytes + write(sizes), rel=0.06)


@pytest.mark.parametrize("form", ["packed:bfloat16", "dense:float32"])
@pytest.mark.parametrize(("rows", "length"), [(2, 512), (8, 192)])
def test_a_model_and_its_block_hold_what_is_planned(opened, mesh, form, rows, length):
    target, model, write = opened(f"delta.gguf@{form}")
    made = plan_of(
        target,
        None,
        mesh,
        written={},
        continued=(12, 50, 40),
        read=(rows, length),
        drafts=drafting.MOST_OWN,
        timed=True,
    )
    block = take_block(model)
    head = count_bytes(jax.eval_shape(model.functions.head, model.params))
    used = read_text(block, rows, length, drafting.MOST_OWN)
    held = block.resident_bytes + head
    states = used.output
    reading = held + 3 * states + used.temporary
    comparing = held + 2 * states + compare([block, block], rows, length).temporary
    phases = [sum_phase(made, x) for x in ("text is read", "its block drafts along it")]
    assert max(phases) == pytest.approx(reading, rel=0.05)
    assert sum_phase(made, "logits are compared") == pytest.approx(comparing, rel=0.05)
    written = model.resident_bytes + write((12, 50, 40))
    # XLA leaves out what of a single period only the last layer's output needs.
    assert sum_phase(made, "prompts are continued") == pytest.approx(written, rel=0.12)
    writer, both = block.as_writer("draft"), (block.params, block.params)
    pair = BlockWriter.of(writer, writer, both, 1)
    ready = {id(x): x for x in jax.tree.leaves(pair.prepare(both, 1))}  # one head for both
    timed = block.resident_bytes + count_bytes([*ready.values(), pair.open_cache(1, 128)])
    assert sum_phase(made, "a pass is timed") == pytest.approx(timed, rel=0.05)
    # Small beside the rest: the block's numbers are in all phases but the one that writes.
    more = block.resident_bytes - model.resident_bytes
    for name in {*made.phases} - {"prompts are continued"}:
        part = made.phases[name].get("its block, float32, for its own", 0)
        assert part == pytest.approx(more, rel=2e-3), name
    wide = made.phases["text is read"].get("its block, for products", 0)
    narrow = target.form.dtype == "bfloat16"
    assert wide == narrow * count_bytes(jax.eval_shape(lambda: block.params["mtp"]))


@pytest.mark.parametrize("forms", [("dense", "packed"), ("dense:float32", "packed:float32")])
def test_of_two_models_one_is_held_at_a_time(paths, mesh, forms):
    """The teacher's head waits for the target's states; its states wait on the host."""
    target, teacher = (
        open_target(f"{paths}/{name}.gguf@{form}")
        for name, form in zip(("small", "plain"), forms, strict=True)
    )
    rows, length = 8, 192
    made = plan_of(
        target, teacher, mesh, written={}, continued=(12, 50, 40), read=(rows, length), timed=True
    )
    models = [target.load(mesh), teacher.load(mesh)]
    heads = [count_bytes(jax.eval_shape(x.functions.head, x.params)) for x in models]
    used = [read_text(x, rows, length) for x in models]
    own, theirs = (x.resident_bytes for x in models)
    found = {
        "prompts are continued": theirs + write(models[1], (12, 50, 40)),
        "the teacher reads text": theirs + heads[1] + 2 * used[1].output + used[1].temporary,
        "the target reads text": own + sum(heads) + 2 * used[0].output + used[0].temporary,
    }
    states = sum(x.output for x in used)
    figures = compare(models, rows, length).temporary
    found["logits are compared"] = own + sum(heads) + states + figures
    writer = models[0].as_writer("time")
    timed = writer.prepare(models[0].params, None), writer.open_cache(1, 128)
    found["a pass is timed"] = own + count_bytes(timed)
    for name, size in found.items():
        assert sum_phase(made, name) == pytest.approx(size, rel=0.05), name
    assert not made.resident and {*made.phases} == {*found}
    assert made.peak == pytest.approx(max(found.values()), rel=0.05)


@pytest.fixture
def text(tmp_path):
    """A file of several documents, as `--data` takes it."""
    lines = [f"def f{i}(x):\n    return x * {i}\n\n" * (3 + i) for i in range(6)]
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.py").write_text(line)
    return tmp_path


def plan_command(monkeypatch, *arguments, memory=None):
    """The exit status, and what the command asked the plan for."""
    asked = {}

    def spy(*sides, **more):
        asked.update(more)
        return plan_evaluation(*sides, **more)

    plan_evaluation = plan.plan_evaluation
    monkeypatch.setattr(plan, "plan_evaluation", spy)
    monkeypatch.setattr(evaluate, "device_summary", lambda: CPU_OF(memory))
    with monkeypatch.context() as patch:
        patch.setattr("kdjax.evaluation.target.load_model", None)  # a plan loads nothing
        status = evaluate.main([*map(str, arguments), "--plan"])
    return status, asked


@pytest.mark.slow
def test_the_command_plans_what_it_then_runs(paths, text, monkeypatch, capsys):
    """Sizes of rows, prompts and answers are those that an evaluation's programs get."""
    tiny = paths / "tiny.gguf"
    write_random_gguf(tiny, DELTA._replace(hidden=128, ffn=256, rows=384), recipe="q8_0")
    settings = [f"--data={text}", "--max-tokens=40", "--batch-size=4", "--cost-ratio=0.1"]
    arguments = [f"{tiny}@packed", "--draft=own", *settings]
    status, asked = plan_command(monkeypatch, *arguments, memory=10**9)
    told = capsys.readouterr().out
    assert status == 0 and "fits" in told and "while its block drafts along it" in told
    assert "checkpoint" not in told  # an evaluation saves none
    assert plan_command(monkeypatch, *arguments, memory=10**6)[0] == 2
    assert "too much" in capsys.readouterr().out

    read, written = set(), []
    split = functools.partial(sharding.split_rows, mesh=sharding.make_local_mesh())
    hidden_states, run = Model.hidden_states, decoding.write_answers

    def look(model, batches, **more):
        shapes = [batch["tokens"].shape for batch in batches]
        read.update((split(rows), length) for rows, length in shapes)
        return hidden_states(model, batches, **more)

    def note(writer, params, ids, sampling, **more):
        written.append((split(more["batch_size"]), max(map(len, ids)), sampling.max_tokens))
        return run(writer, params, ids, sampling, **more)

    monkeypatch.setattr(Model, "hidden_states", look)
    monkeypatch.setattr("kdjax.models.model.write_answers", note)
    evaluate.main([*arguments])
    assert read == {asked["read"]}
    examined, *continued = written
    assert {*continued} == {asked["continued"]} and asked["drafts"] == 8 and not asked["timed"]
    assert [*asked["written"].values()] == [examined]


def test_a_plan_does_not_give_every_row_the_room_of_one_long_prompt(paths, tmp_path, monkeypatch):
    """It is answered behind the others, as the command then does with the same room."""
    easy = {"code": "def f(a): return a", "test_list": ["assert 1"]}
    texts = ["Add."] * 31 + ["Add " + "one and " * 100 + "two."]
    lines = [json.dumps(easy | {"task_id": 11 + i, "text": x}) for i, x in enumerate(texts)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(lines))
    asked = [f"{paths}/small.gguf", f"--mbpp={tmp_path}/mbpp.jsonl", "--allow-unsandboxed"]
    asked += ["--max-tokens=32", "--batch-size=1024", "--wording=base"]
    slots = sharding.split_rows(1024, sharding.make_local_mesh())
    _, found = plan_command(monkeypatch, *asked)
    rows, prompt, _ = found["written"]["mbpp is answered"]
    assert rows == slots and prompt < 300


@pytest.mark.parametrize("kernels", [True, False])
def test_a_plan_gives_benchmarks_the_room_that_they_get(paths, tmp_path, monkeypatch, kernels):
    """One for all where kernels read of a slot what its row has."""
    easy = {"task_id": 11, "text": "Add.", "code": "def f(a): return a", "test_list": ["assert 1"]}
    long = {"task_id": "0", "prompt": "# one\n" * 60, "entry_point": "f", "test": ""}
    long["canonical_solution"] = ""
    asked = [f"{paths}/small.gguf", "--max-tokens=32", "--wording=base", "--allow-unsandboxed"]
    for name, record in (("mbpp", easy), ("humaneval", long)):
        (tmp_path / name).write_text(json.dumps(record))
        asked.append(f"--{name}={tmp_path / name}")
    monkeypatch.setattr(evaluate.Placement, "on", lambda mesh: evaluate.Placement(mesh, kernels))
    _, found = plan_command(monkeypatch, *asked)
    short, longest = (found["written"][f"{name} is answered"][1] for name in ("mbpp", "humaneval"))
    assert longest > 180 and (short == longest if kernels else short < 180)


def test_the_command_plans_text_and_benchmarks(paths, text, tmp_path, monkeypatch, capsys):
    problem = {
        "task_id": 1,
        "text": "Add.",
        "code": "def f(a): return a",
        "test_list": ["assert 1"],
    }
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(problem | {"task_id": 11}))
    small, plain = (f"{paths}/{name}.gguf" for name in ("small", "plain"))
    arguments = [
        small,
        f"--teacher={plain}@packed",
        f"--data={text}",
        "--seq-len=48",
        "--batch-size=3",
    ]
    more = [f"--mbpp={tmp_path}/mbpp.jsonl", "--allow-unsandboxed", "--max-tokens=32"]
    one = sharding.split_rows(3, sharding.make_local_mesh())
    status, asked = plan_command(monkeypatch, *arguments, *more)
    told = capsys.readouterr().out
    assert status == 0 and asked["read"] == (one, 48) and asked["continued"] is None
    rows, prompt, answer = asked["written"]["mbpp is answered"]
    assert (rows, answer) == (one, 32) and 10 < prompt < 300
    for phase in ("mbpp is answered", "the teacher reads text", "the target reads text"):
        assert f"while {phase}:" in told
    assert evaluate.main([small, "--draft=own", f"--data={text}", "--plan"]) == 2
    assert "whose files have a block that drafts" in capsys.readouterr().err
