"""States of loops of one's own: saved, loaded, and refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import kdjax
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import CheckError, UserError
from kdjax.formats.saved import saved_steps


class Bigram(nnx.Module):
    """The next id by the last one alone."""

    def __init__(self, width=8):
        key = jax.random.key(0)
        self.table = nnx.Param(jax.random.normal(key, (16, width)))
        self.bias = nnx.Param(jnp.zeros((width,)))

    def hidden(self, tokens, segment_ids, positions):
        return self.table[...][tokens] + self.bias[...][None, None]

    def head_weight(self):
        return self.table[...]


def make_step(optimizer=None, width=8, devices=1):
    mesh: Mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
    student = kdjax.Model.from_module(Bigram(width)).replace(placement=Placement.on(mesh))
    step = kdjax.make_step(student, None, kdjax.KDLoss(alpha=1), optimizer or optax.adam(0.1))
    return step, step.init(student.params)


def train(step, state, count=1):
    ids = np.random.default_rng(0).integers(0, 16, (4, 9), dtype=np.int32)
    for _ in range(count):
        state, _ = step(state, {}, {"tokens": ids[:, :-1], "labels": ids[:, 1:]})
    return state


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_a_state_comes_back_on_any_number_of_devices(tmp_path):
    """Masks and a counter as optax has them, and moments of half the bytes, among its arrays."""
    frozen = {"table": "adam", "bias": "none"}
    half = optax.chain(optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.scale(-0.1))
    optimizer = optax.partition({"adam": half, "none": optax.set_to_zero()}, frozen)
    step, state = make_step(optimizer, devices=4)
    assert kdjax.load_state(tmp_path / "a", step) is None
    state = train(step, state)
    kdjax.save_state(tmp_path / "a", state)
    other, _ = make_step(optimizer)
    found = kdjax.load_state(tmp_path / "a", other)
    assert_same(found, state)
    assert {x.sharding.num_devices for x in jax.tree.leaves(found)} == {1}
    assert int(train(other, found).step) == 2


def test_a_damaged_step_is_moved_aside_and_the_one_before_taken(tmp_path):
    step, state = make_step()
    for _ in range(3):
        state = train(step, state)
        kdjax.save_state(tmp_path, state, keep=2)
    assert saved_steps(tmp_path) == [2, 3]
    files = [path for path in (tmp_path / "checkpoints/3/state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    assert int(kdjax.load_state(tmp_path, step).step) == 2
    assert (tmp_path / "damaged-3" / "error.txt").exists()
    for path in (tmp_path / "checkpoints/2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(CheckError, match="holds no intact checkpoint"):
        kdjax.load_state(tmp_path, step)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    step, state = make_step()
    kdjax.save_state(tmp_path, train(step, state))
    with pytest.raises(UserError, match="found keep=0; expected 1 or more"):
        kdjax.save_state(tmp_path, train(*make_step(), count=2), keep=0)
    assert saved_steps(tmp_path) == [1]
    with pytest.raises(UserError, match="found step 1 saved and a state of step 1"):
        kdjax.save_state(tmp_path, train(*make_step()))
    for other, message in (
        (make_step(optax.sgd(0.1)), r"opt_state/0/count: int32 \[\]; expected no such array"),
        (make_step(width=4), r"opt_state/0/mu/bias: float32 \[8\]; expected float32 \[4\]"),
    ):
        with pytest.raises(UserError, match=message):
            kdjax.load_state(tmp_path, other[0])
    (file := tmp_path / "file").write_text("")
    for use, given in ((kdjax.load_state, step), (kdjax.save_state, make_step()[1])):
        with pytest.raises(UserError, match="file: found a file; expected the folder of save_st"):
            use(file, given)
        with pytest.raises(UserError, match="file: found a file; expected the folder of save_st"):
            use(file / "inner", given)
        for inner in ("checkpoints", "checkpoints/1", "checkpoints/2"):
            with pytest.raises(
                UserError, match=rf"{inner}: found steps of .*; expected the folder"
            ):
                use(tmp_path / inner, given)
    with pytest.raises(UserError, match="the state of a loop or a module of your own"):
        kdjax.load(tmp_path)
    (tmp_path / "receipt.json").write_text("{}")
    with pytest.raises(UserError, match="holds a run of kdjax train"):
        kdjax.save_state(tmp_path, train(*make_step(), count=2))


def test_a_state_that_a_step_has_taken_is_not_saved(tmp_path):
    step, state = make_step()
    train(step, state)
    with pytest.raises(UserError, match="a state that an earlier step has taken"):
        kdjax.save_state(tmp_path, state)
    assert not saved_steps(tmp_path)
    with pytest.raises(UserError, match="no position of weight in the batches"):
        step.evaluate(make_step()[1], {}, [])
