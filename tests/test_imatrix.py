"""Importance matrices: what is summed, the file, and what an export makes of it."""

import os
import struct
from unittest import mock

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases

import kdjax
from kdjax import progress
from kdjax.commands import imatrix
from kdjax.errors import UserError
from kdjax.export import export_gguf
from kdjax.formats import open_table
from kdjax.formats.blocks import decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.formats.imatrix import read_importance, write_importance
from kdjax.models import decoder, weights
from kdjax.models.importance import sum_squares

pytestmark = pytest.mark.usefixtures("one_device")


def test_sums_of_squares_are_those_of_what_each_matrix_is_multiplied_with(models, tmp_path):
    """Beside a forward pass whose products are listened to; the file is read by gguf-py."""
    student = kdjax.load(models / "student.gguf", dtype="float32")
    tokens = np.random.default_rng(0).integers(0, student.real_vocab, (4, 24))
    heard = {}

    def listen(function):
        def call(x, weights, *rest):
            for weight in weights if isinstance(weights, list | tuple) else [weights]:
                note = heard.setdefault(tuple(weight.shape), []).append
                jax.debug.callback(note, jnp.square(x).sum(axis=0), ordered=True)
            return function(x, weights, *rest)

        return call

    with (
        mock.patch.object(decoder, "project", listen(decoder.project)),
        mock.patch.object(decoder, "project_all", listen(decoder.project_all)),
        mock.patch.object(weights, "project_all", listen(weights.project_all)),
    ):
        columns = tokens, np.ones_like(tokens), np.tile(np.arange(24), (4, 1))
        last = jax.jit(lambda *text: student.functions.hidden(student.params, *text))(*columns)
        jax.effects_barrier()
    sums, count = sum_squares(student, [tokens[:3], tokens[3:]])
    assert count == tokens.size and len(sums) == 7 * student.spec.num_layers + 1
    squares = np.square(np.asarray(last, np.float64)).sum((0, 1))
    np.testing.assert_allclose(sums["token_embd.weight"], squares, rtol=1e-4)
    table, places = open_table(models / "student.gguf"), {}
    order = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(student.spec.num_layers):
        for part in order:
            name = f"blk.{layer}.{part}.weight"
            shape = tuple(table.info(name).shape)
            place = places[shape] = places.get(shape, -1) + 1
            np.testing.assert_allclose(sums[name], heard[shape][place], rtol=1e-4)
    path = tmp_path / "im.gguf"
    write_importance(path, sums, count, datasets=["text"], chunk_size=24)
    back = read_importance(path)
    read = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    for name, values in sums.items():
        np.testing.assert_allclose(back[name][0], values / count, rtol=1e-6)
        np.testing.assert_allclose(read[f"{name}.in_sum2"].ravel(), values, rtol=1e-6)
        assert read[f"{name}.counts"].ravel().tolist() == [count]


def test_the_command_measures_what_export_then_weighs_by(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    text = tmp_path / "a.py"  # its end does not fill the last of eight rows
    text.write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(200)))
    out = tmp_path / "im.gguf"
    where = [str(models / "student.gguf"), f"--data={text}", f"--out={out}", "--seq-len=32"]
    assert imatrix.main([*where, "--rows=8", "--batch-size=2"]) == 0
    said = capsys.readouterr()
    assert "15 matrices, 224 positions" in said.out and "batches read: 3 of 4" in said.err
    student = kdjax.load(models / "student.gguf", dtype="float32")
    for name, path in (("plain", ""), ("weighed", out)):
        export_gguf(student, tmp_path / f"{name}.gguf", dtype="q4_0", imatrix=path)
    plain, weighed = (open_table(tmp_path / f"{name}.gguf") for name in ("plain", "weighed"))
    same = {name: np.array_equal(plain.raw(name), weighed.raw(name)) for name in plain}
    assert not same["blk.0.ffn_down.weight"] and same["token_embd.weight"]
    assert imatrix.main([*where, "--rows=0"]) == 2
    kept = out.read_bytes()
    assert imatrix.main([*where, "--rows=4"]) == 2 and out.read_bytes() == kept
    assert "is there already" in capsys.readouterr().err
    assert imatrix.main([*where, "--rows=4", "--overwrite"]) == 0 and out.read_bytes() != kept


def test_a_place_that_takes_no_file_is_refused_before_the_model_reads(
    models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        imatrix, "measure_importance", lambda *_, **__: pytest.fail("the model reads")
    )
    (tmp_path / "a.py").write_text("def f(x):\n    return x\n" * 99)
    where = [str(models / "student.gguf"), f"--data={tmp_path}/a.py", "--seq-len=32"]
    assert imatrix.main([*where, f"--out={tmp_path}/a.py/im.gguf"]) == 2
    assert f"{tmp_path}/a.py is no folder" in capsys.readouterr().err
    os.mkfifo(pipe := tmp_path / "pipe")  # stands for /dev/null
    for out, kind in ((tmp_path, "a folder"), (pipe, "no regular file")):
        assert imatrix.main([*where, f"--out={out}", "--overwrite"]) == 2
        assert f"error: {out} is {kind}; expected a file" in capsys.readouterr().err
    (tmp_path / "link.gguf").symlink_to(models / "student.gguf")
    for out in (models / "student.gguf", tmp_path / "link.gguf"):
        assert imatrix.main([*where, f"--out={out}", "--overwrite"]) == 2
        assert f"error: {out} is what the command reads" in capsys.readouterr().err
    assert imatrix.main([*where[:2], f"--out={tmp_path}/a.gguf", "--seq-len=99999"]) == 2
    assert "--seq-len=99999: the model has " in capsys.readouterr().err


def test_a_model_in_float8_is_refused(models):
    student = kdjax.load(models / "student.gguf", weights="float8")
    with pytest.raises(UserError, match=r"in float8; expected one kept dense or packed"):
        sum_squares(student, [np.zeros((1, 4), int)])


def test_its_file_is_no_model(tmp_path):
    write_importance(tmp_path / "im.gguf", {"a": np.ones(4)}, 1, datasets=["text"], chunk_size=24)
    with pytest.raises(UserError, match=r"found no general.architecture .* model_type"):
        kdjax.load(tmp_path / "im.gguf")


@pytest.mark.parametrize(("kind", "shape", "counts"), [("F32", (1, 64), 3), ("F16", (1, 64), 1)])
def test_sums_that_fit_no_counts_are_refused(kind, shape, counts, tmp_path):
    sums = np.ones(shape, "<f4" if kind == "F32" else "<f2").view(np.uint8)
    rows = [("a.in_sum2", kind, shape, sums)]
    rows += [("a.counts", "F32", (counts, 1), np.ones((counts, 1), "<f4").view(np.uint8))]
    write_gguf(tmp_path / "i.gguf", {"general.type": "imatrix"}, rows)
    with pytest.raises(UserError, match=f"found 64 sums of a and {counts} counts in F"):
        read_importance(tmp_path / "i.gguf")


@pytest.mark.parametrize(
    "data",
    [
        bytes(64),
        struct.pack("<i", -1) + bytes(64),
        struct.pack("<iiii", 3_000_000, -12, 0, 0) + bytes(64),
        struct.pack("<iibii", 1, 1, 97, 1, -1) + bytes(64),
    ],
)
def test_an_older_file_that_holds_nothing_is_refused(data, tmp_path):
    """An export went on without it, and said nothing."""
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(UserError, match="found no importance matrix"):
        read_importance(tmp_path / "i.dat")


def test_an_expert_that_no_token_chose_has_an_importance_of_one(tmp_path):
    """llama-quantize takes 1 as well; llama-imatrix leaves a count of 0."""
    rows = [("a.in_sum2", "F32", (2, 4), np.array([[0] * 4, [8] * 4], "<f4").view(np.uint8))]
    rows += [("a.counts", "F32", (2, 1), np.array([[0], [2]], "<f4").view(np.uint8))]
    write_gguf(tmp_path / "i.gguf", {"general.type": "imatrix"}, rows)
    assert read_importance(tmp_path / "i.gguf")["a"].tolist() == [[1] * 4, [4] * 4]


@pytest.mark.parametrize(
    "kind", cases("Q2_K", "Q4_0", slow=["IQ4_XS", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0"])
)
@pytest.mark.parametrize("zeros", [32, 256, 512])
def test_columns_of_no_importance_are_not_noise(kind, zeros):
    """Their error was 2 for numbers of size 1, of zeros it is 1; llama.cpp's is that of others."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    importance = np.r_[np.zeros(zeros), np.ones(512 - zeros)].astype(np.float32)

    def error(*weights):
        lost = np.asarray(decode(np.asarray(encode(x, kind, *weights)), kind)) - x
        return np.sqrt(np.mean(lost**2, axis=0))

    plain, weighed = error(), error(importance)
    assert weighed[:zeros].mean() < 1.2 * plain[:zeros].mean()
    assert zeros == 512 or weighed[zeros:].mean() < 1.05 * plain[zeros:].mean()
