"""The benchmark: one compile a length, memory by XLA's own report, and figures put side by side."""

import json
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from kdjax.errors import UserError
from kdjax.losses.kd import KDLoss, kd_loss
from kdjax.models.loading import count_parameters
from kdjax.training import pair
from kdjax.training import step as training_step
from scripts.bench import peer, program, rollouts, rows, step, vocabularies
from scripts.bench.arms import run_arms
from scripts.checks import compiled_memory

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def args(models, tmp_path):
    return step.arguments(
        [
            f"--folder={tmp_path}",
            f"--teacher={models}/teacher.gguf",
            "--dtype=float32",
            f"--student={models}/student.gguf",
            "--rows=8",
            "--length=64",
            "--steps=1",
        ]
    )


@pytest.fixture
def traces(monkeypatch):
    """The lengths for which the step was traced."""
    seen, original = [], training_step.kd_step

    def counted(state, teacher, batch, base, *, spec):
        seen.append(batch["tokens"].shape[1])
        return original(state, teacher, batch, base, spec=spec)

    monkeypatch.setattr(training_step, "kd_step", counted)
    return seen


def measured(variant, args, **changes):
    request = step.kdjax_request(variant, args, **changes)
    return program.measure(program.Request(**request))


@pytest.mark.slow
def test_each_length_compiles_once_and_memory_is_what_the_variant_promises(args, traces):
    found = {name: measured(name, args)[0] for name in ("dense", "packed-bf16moments")}
    assert traces == [64, 64]
    args.sweep_length = "64,32"
    short, found["packed"] = measured("packed", args, documents="4:40")
    assert traces == [64, 64, 32, 64] and (short["length"], found["packed"]["length"]) == (32, 64)
    assert short["temporaries_gb"] < found["packed"]["temporaries_gb"]
    arguments = {name: 1e9 * row["arguments_gb"] for name, row in found.items()}
    teachers = {name: 1e9 * row["teacher_gb"] for name, row in found.items()}
    saved = teachers["dense"] - teachers["packed"]
    assert saved > 0.5 * teachers["dense"]
    assert arguments["dense"] - arguments["packed"] == pytest.approx(saved, rel=0.01)
    student = 4 * count_parameters(step.spec_from_table(step.open_table(args.student)))
    less = arguments["packed"] - arguments["packed-bf16moments"]
    assert less == pytest.approx(student, rel=0.01)  # half of two moments of the student's size
    assert all(np.isfinite(row["loss"]) for row in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), [("topk", ""), ("hidden", ":mesh.data=2")])
def test_a_cached_teacher_is_records_and_its_forward_pass_is_not_counted(args, traces, kind, mesh):
    (row,) = measured(f"cached-{kind}{mesh}", args, k=8)
    assert traces == [64] and np.isfinite(row["loss"])
    teacher, student = (
        step.spec_from_table(step.open_table(p)) for p in (args.teacher, args.student)
    )
    head = 0 if kind == "topk" else student.vocab_size * teacher.hidden_size
    assert row["teacher_gb"] * 1e9 == 4 * head
    rows = [row | {"program": f"cached-{kind}"}]
    step.add_rates(rows, None, args)
    want = row["tokens_per_s"] * (3 * student.forward_flops(64) + 2 * head)
    assert rows[0]["tflops"] * 1e12 == pytest.approx(want)


def test_unknown_names_say_which_there_are(args, capsys):
    assert step.main(["--variants=q5k"]) == 2
    assert "dense" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"teacher\.fancy='x': no such field"):
        program.configured({"teacher.fancy": "x"})
    args.set = ["teacher.allow_degenerate=true"]
    settings = step.settings_of("packed:loss.temperature=2:student.remat=dots", args)
    config = program.configured(settings)
    assert config.loss.temperature == 2.0 and config.student.remat == "dots"
    assert config.teacher.allow_degenerate is True and config.teacher.weights == "packed"


def test_a_student_of_its_teachers_shape_has_numbers_of_its_own(args):
    """Else the pair is refused, and no card could be tried with the largest that fits it."""
    args.teacher = args.student = "tiny-student"
    fields = step.settings_of("packed-lora", args)
    files = [Path(fields[f"{part}.path"]) for part in ("teacher", "student")]
    contents = {file.read_bytes() for file in files}
    assert len(contents) == 2 and len({len(content) for content in contents}) == 1


def test_the_peer_has_the_same_loss_and_ids(args):
    args.set = ["loss.temperature=1", "loss.alpha=0.2"]
    asked = step.torch_request("torch-compile", args)
    config = program.configured(step.settings_of("dense", args))
    assert (asked["temperature"], asked["alpha"]) == (1.0, 0.2)
    assert (config.loss.temperature, config.loss.alpha) == (1.0, 0.2)
    assert asked["vocab"] == asked["student"]["vocab_size"]
    assert step.ids_of(151_936) == 151_665  # of Qwen2.5's tokenizer


def test_a_variant_that_fails_leaves_a_row_that_says_why(args):
    request = {"settings": {"train.steps": 0}, "lengths": [64]}
    (row,) = step.run("program", request, "broken", args)
    assert row["program"] == "broken" and "status 1" in row["error"]
    assert (
        "train.steps" in row["error"] or "Traceback" in Path(args.folder, "broken.log").read_text()
    )


def row(program, length, speed, **more):
    return dict(program=program, length=length, tokens_per_s=speed, step_ms=1e3 / speed) | more


def test_speeds_stand_beside_the_best_peer_of_the_same_length(args):
    rows = [
        row("packed", 64, 300.0),
        row("torch-eager", 64, 100.0),
        row("torch-compile", 64, 200.0),
        row("packed", 32, 90.0),
        {"program": "dense", "error": "status 1"},
    ]
    step.add_rates(rows, 2e9, args)
    assert [r.get("over_peer") for r in rows] == [1.5, 0.5, 1.0, None, None]
    specs = [step.spec_from_table(step.open_table(p)) for p in (args.teacher, args.student)]
    flops = specs[0].forward_flops(64) + 3 * specs[1].forward_flops(64)
    assert rows[0]["of_matmul"] == pytest.approx(300 * flops / 2e9)
    text = step.report(rows)
    assert "| packed | 64 | 3.3 | 300 |" in text and "dense: status 1" in text


def test_a_benchmark_that_is_cut_short_keeps_what_it_measured(args, monkeypatch, tmp_path):
    def measure(variant, args):
        if variant == "packed":
            raise KeyboardInterrupt
        return [row(variant, 64, 100.0)]

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setattr(step, "run", lambda *_: [{"matmul_flops": 2e9, "devices": "x"}])
    command = [
        f"--teacher={args.teacher}",
        f"--student={args.student}",
        f"--folder={tmp_path}",
        "--variants=dense,packed",
        f"--json={tmp_path / 'found.json'}",
    ]
    with pytest.raises(KeyboardInterrupt):
        step.main(command)
    (kept,) = json.loads((tmp_path / "found.json").read_text())
    assert [r["tokens_per_s"] for r in kept["rows"]] == [100.0] and kept["matmul_flops"] == 2e9


@pytest.fixture
def scaling(monkeypatch, tmp_path):
    """Runs `--scaling` without processes; returns (variant, count, first) of groups, and JSON."""
    groups = []

    def measure(variant, args):
        groups[-1].append((variant, args.count, args.first))
        speed = 100.0 * args.count * (1 if args.count == 1 else 0.9)
        losses = [1.0, 2.0 + args.count / 1e6] if args.losses else []
        return [row(variant, 64, speed, devices=args.count, losses=losses)]

    def one_after_the_other(group, args, original=step.measure_group):
        groups.append([])
        return original(group, args)

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setattr(step, "measure_group", one_after_the_other)
    monkeypatch.setattr(step, "run", lambda *_: [{"matmul_flops": 2e9, "devices": "x"}])

    def run(*flags):
        groups.clear()
        sizes = "--teacher=tiny-teacher", "--student=tiny-student", f"--folder={tmp_path}"
        where = f"--json={tmp_path / 'found.json'}"
        assert step.main(["--scaling", "--devices=1,2,4,8", *sizes, where, *flags]) == 0
        return list(groups), json.loads((tmp_path / "found.json").read_text())

    return run


def test_the_tables_of_several_devices_come_in_order_side_by_side_and_once(scaling, capsys):
    groups, found = scaling()
    first = [[("dense-fast", 1, 0), ("dense-fast", 2, 1), ("dense-fast", 4, 3)]]
    assert [sorted(group, key=lambda case: case[1]) for group in groups[:1]] == first
    assert groups[1] == [("dense-fast", 8, 0)] and groups[2][0][0] == "float8-fast"
    assert all(sum(count for _, count, _ in group) <= 8 for group in groups)
    assert [group[0][0] for group in groups if "fsdp" in group[0][0]] == 2 * [mock.ANY]
    titles = [document["title"] for document in found]
    assert "8 x 2048 a device" in titles[0] and "64 x 2048 together" in titles[-1]
    eight = [r["of_linear"] for r in found[0]["rows"] if r["devices"] == 8 and "of_linear" in r]
    assert eight == [pytest.approx(0.9)] * 6
    spread = [r["loss_off"] for r in found[-1]["rows"] if "loss_off" in r]
    assert spread == pytest.approx([0, 0, 1e-6, 3e-6, 7e-6])
    assert "off the first row's" in capsys.readouterr().out
    again, same = scaling()
    assert not again and same == found  # an earlier command measured all


@pytest.mark.parametrize(
    ("shown", "count", "first", "seen"),
    [(None, 2, 2, "2,3"), ("3", 1, 0, "3"), ("1,3,5", 2, 1, "3,5")],
)
def test_processes_take_devices_that_the_call_was_shown(monkeypatch, shown, count, first, seen):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert step.visible(count, first)["CUDA_VISIBLE_DEVICES"] == seen


def test_strong_scaling_computes_the_same_rows_at_a_time_on_any_number(args):
    asked = step.arguments([f"--folder={args.folder}"], strong=64)
    asked.teacher, asked.student = args.teacher, args.student
    for asked.count, parts in ((1, 8), (2, 4), (8, 1)):
        settings = step.settings_of("dense", asked)
        assert (settings["train.batch_size"], settings["train.microbatches"]) == (64, parts)


def test_nothing_is_begun_that_its_limit_would_cut(scaling, tmp_path, capsys):
    (tmp_path / "found.json").write_text("[]")
    groups, found = scaling("--limit=20")
    assert groups == found == [] and "s are left: stopped before" in capsys.readouterr().out


def test_rounds_give_the_median_and_a_failed_round_is_left_out():
    rounds = [[row("packed", 64, speed)] for speed in (100.0, 300.0, 200.0)]
    (found,) = step.middle(rounds)
    assert found["tokens_per_s"] == 200.0 and len(found["rounds_ms"]) == 3
    failed = [{"program": "packed", "error": "x"}]
    assert step.middle([failed, *rounds])[0]["tokens_per_s"] == 200.0
    assert step.middle([failed])[0]["error"] == "x"


def test_idle_share_counts_long_gaps_between_overlapping_events():
    spans = [(0, 10), (2, 4), (11, 20), (50, 100)]  # gaps of 1 and 30
    events = [(*span, "fusion") for span in spans]
    assert program.idle_share(events[::-1], 5) == pytest.approx(0.30)
    assert program.idle_share(events, 1) == pytest.approx(0.31)
    assert program.idle_share([], 5) is None


def test_what_devices_exchange_is_told_apart_from_what_they_compute():
    ms = 1_000_000
    events = [
        (0, 10 * ms, "fusion"),
        (8 * ms, 14 * ms, "ncclDevKernel_AllReduce"),
        (12 * ms, 15 * ms, "MemcpyP2P"),
        (16 * ms, 20 * ms, "nvjet"),
    ]
    want = dict(idle_ms=1, sums_ms=6, sums_alone_ms=2, copies_ms=3, copies_alone_ms=1)
    found = program.split_time(events, steps=2)
    assert found == {name: pytest.approx(time / 2) for name, time in want.items()}
    assert program.split_time([], 1) == {}


def test_copies_to_and_from_the_host_are_no_work_of_the_device(tmp_path, monkeypatch):
    named = types.SimpleNamespace
    events = [
        named(name=name, start_ns=start, end_ns=start + 5)
        for start, name in enumerate(["MemcpyH2D", "MemcpyD2D", "fusion", "MemcpyD2H"])
    ]
    lines = [named(name="Stream #14(Compute)", events=events), named(name="Steps", events=events)]
    planes = [named(name=n, lines=lines) for n in ("/device:GPU:0", "/device:GPU:1", "/host:CPU")]
    profile = named(from_file=lambda path: named(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", profile)
    (tmp_path / "a.xplane.pb").touch()
    assert program.device_events(tmp_path) == [(1, 6, "MemcpyD2D"), (2, 7, "fusion")]


def test_made_rows_hold_documents_of_the_lengths_asked_for():
    made = rows.made_rows(50, 400, 99, "20:90", most=32)
    assert made.tokens.shape == (50, 401) and made.tokens.max() < 99
    for segments in made.segments:
        counts = np.bincount(segments)[1:]
        assert np.all(np.diff(segments) >= 0) and counts[:-1].min() >= 20 and counts.max() <= 91
    assert set(rows.made_rows(5, 64, 9).segments.ravel()) == {1}
    assert all(s.max() == 8 for s in rows.made_rows(5, 64, 9, "8").segments)
    again = rows.made_rows(50, 400, 99, "20:90", most=32)
    np.testing.assert_array_equal(made.segments, again.segments)


@pytest.mark.parity
def test_the_peer_minimises_the_same_loss(rng):
    torch = pytest.importorskip("torch")
    ours, theirs = (rng.standard_normal((6, n)).astype(np.float32) * 3 for n in (40, 44))
    labels = rng.integers(0, 40, 6)
    want = kd_loss(ours, theirs[:, :40], labels, KDLoss(temperature=4.0, alpha=0.3)).sum()
    got = peer.kd_loss(*map(torch.from_numpy, (ours, theirs, labels)), 4.0, 0.3)
    assert float(got) == pytest.approx(float(want), rel=1e-5)


def test_the_peer_is_skipped_with_a_reason_where_it_cannot_run(args, monkeypatch):
    said = "Traceback\nModuleNotFoundError: No module named 'torch'\n"
    done = step.subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(step.subprocess, "run", lambda *_, **__: done)
    (found,) = step.measure("torch-compile", args)
    assert found["error"] == "torch-compile: skipped, ModuleNotFoundError: No module named 'torch'"
    assert json.dumps(found)


@pytest.mark.slow
def test_generation_is_timed(tmp_path):
    answer = tmp_path / "figures.json"
    lengths = "--prompt-tokens=3:9", "--answer-tokens=1:9", "--slots=4", "--prompts=6"
    where = f"--folder={tmp_path}", f"--json={answer}", "--shape=tiny-student", "--parts"
    where += (f"--trace={tmp_path / 'trace'}",)
    assert rollouts.main([*lengths, *where, "--dtype=float32"]) == 0
    (row,) = json.loads(answer.read_text())
    assert row["tokens"] >= 6 and row["slots"] == 4
    assert row["full_tokens_per_s"] == pytest.approx(4e3 / row["step_ms"])
    assert min(row["head_ms"], row["read_1_prompts_of_64_ms"]) > 0
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_kernels_of_a_trace_are_summed_by_name(tmp_path, monkeypatch, capsys):
    """Two steps: names without their numbers, the slowest first."""
    events = [(0, 1e6, "add_fusion_1"), (1e6, 4e6, "add_fusion"), (4e6, 10e6, "dot.7")]
    monkeypatch.setattr(rollouts, "device_events", lambda folder: events)
    found = rollouts.trace(lambda: None, tmp_path, 2)
    assert found == [("dot", 3.0, 0.5), ("add_fusion", 2.0, 1.0)]
    assert "5.000 ms      1.5 x  all" in capsys.readouterr().out


def test_arms_that_have_a_line_are_not_run_again_and_one_that_fails_is_passed_over(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("scripts.bench.arms.gc", mock.Mock())  # seconds of all that pytest holds
    monkeypatch.setattr("scripts.bench.arms.time", types.SimpleNamespace(monotonic=lambda: 5.0))
    seconds = {"a": 1, "b": 2, "c": 9, "d": 3}
    arms = [types.SimpleNamespace(name=name, seconds=s) for name, s in seconds.items()]
    ran = []

    def run(arm):
        ran.append(arm.name)
        return {"half": 1 / (len(ran) - 1)}  # the first fails

    for _ in range(2):
        run_arms(arms, run, tmp_path, until=19.0, around=6.0)
    assert ran == ["a", "b", "d", "a"]  # c would end too late
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["name"], line["half"]) for line in lines] == [("b", 1), ("d", 0.5), ("a", 1 / 3)]
    assert '"failed": "division by zero"' in capsys.readouterr().out


def test_each_way_to_ask_a_teacher_is_an_arm_with_a_name():
    """Arms of one name are one line of the results: the second would not be run."""
    asked = dict(teachers=["dense", "cached"], peers=["gold"], alphas=[0.2, 0.4], rates=[1e-4])
    options = types.SimpleNamespace(**asked, seeds=2, toy=False, steps=0, curve=0, seconds=9.0)
    arms = list(vocabularies.list_arms(options, ["a.gguf"]))
    assert len({arm.name for arm in arms}) == len(arms) == 2 * (2 * 3 + 1)
    assert [arm.kind for arm in arms[:3]] == [
        "dense, alpha 0.2",
        "cached, alpha 0.2",
        "gold, alpha 0.2",
    ]
    assert [arm.kind for arm in arms if arm.alpha == 1] == ["text"] * 2


def test_vocabularies_without_a_result_end_with_a_line(tmp_path, monkeypatch, capsys):
    """Every arm failed, or none began: the table ended with a traceback."""
    begun = mock.Mock(side_effect=UserError("no such student"))
    monkeypatch.setattr(vocabularies, "run_arm", begun)
    asked = [f"--out={tmp_path}", "--student=a.gguf", "--seeds=1", "--rates=1e-4", "--seconds=9"]
    assert vocabularies.main(asked) == 2
    assert "error: found no result in" in capsys.readouterr().err
    config, _, arm = begun.call_args.args
    # The student's own weights: of the demo's config for random ones they were not read.
    assert config.student.init == "checkpoint" and arm.student == "a.gguf"


def test_a_pair_with_too_narrow_a_teacher_is_not_timed_as_one_vocabulary():
    tokenizer = types.SimpleNamespace(vocab_size=300)
    with vocabularies.take_for_one():
        assert pair.choose_vocabulary(320, 310, tokenizer, None).width == 310
        with pytest.raises(UserError, match="300 ids and a teacher's head of 299 rows"):
            pair.choose_vocabulary(320, 299, tokenizer, None)


def test_scripts_have_the_parser_of_a_run(capsys):
    """No command of kdjax, they ended with a KeyError."""
    with pytest.raises(SystemExit, match="0"):
        vocabularies.main(["--help"])
    assert "0  finished" in capsys.readouterr().out
    config = compiled_memory.make_config(types.SimpleNamespace(set=["train.batch_size=3"]))
    assert config.train.batch_size == 3
