"""Programs that threads compile while text is read and models are loaded."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases

from kdjax.training.ahead import Ahead
from kdjax.training.job import assemble

pytestmark = pytest.mark.usefixtures("one_device")
SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


def double(x):
    return 2 * x


def test_a_program_is_traced_at_once_and_compiled_by_a_thread(monkeypatch):
    """Before its arguments exist; nothing else that runs in Python takes turns with its tracing."""
    traced, compiled, may_compile = [], [], threading.Event()

    def wait(lowered, compile=jax.stages.Lowered.compile):
        may_compile.wait()
        compiled.append(threading.current_thread())
        return compile(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", wait)
    ahead = Ahead(jax.jit(lambda x: traced.append(threading.current_thread()) or 2 * x), SHAPE)
    assert traced == [threading.current_thread()] and not compiled
    may_compile.set()
    assert np.array_equal(ahead(jnp.arange(4.0)), [0, 2, 4, 6])
    assert len(traced) == len(compiled) == 1 and compiled[0] is not traced[0]


def test_arguments_of_other_shapes_are_compiled_when_they_come():
    ahead = Ahead(jax.jit(double), SHAPE)
    assert np.array_equal(ahead(jnp.arange(3.0)), [0, 2, 4])
    assert np.array_equal(ahead(jnp.arange(4.0)), [0, 2, 4, 6])


def test_a_program_that_does_not_compile_raises_where_it_is_called():
    calls = []

    def fail(x):
        calls.append(x)
        raise ZeroDivisionError(f"call {len(calls)}")

    ahead = Ahead(jax.jit(fail), SHAPE)
    with pytest.raises(ZeroDivisionError, match="call 2"):
        ahead(jnp.arange(4.0))
    assert len(calls) == 2


def set_packed(config):
    config.teacher.weights = "packed"


def set_rounded(config):
    config.student.quantize = "q4_0"


def set_adapters(config):
    config.student.lora.rank = 2


def set_alone(config):
    config.teacher.path, config.loss.alpha = "", 1.0


@pytest.mark.parametrize("change", cases(set_packed, slow=[set_rounded, set_adapters, set_alone]))
def test_a_run_takes_the_programs_and_trains_to_the_same_bits(
    change, tiny_config, tmp_path, caplog
):
    """Models are opened twice, and logged once."""
    caplog.set_level("INFO", "kdjax")
    tiny_config.loss.temperature = 1.0
    change(tiny_config)
    ends = []
    for ahead in (True, False):
        job = assemble(tiny_config, tmp_path / str(ahead), ahead=ahead)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == len(set(said)), said
        caplog.clear()
        step, state = job.step, job.make_state()
        judged, batch = step.see(state), next(job.eval_batches())
        sums = step.sum_evaluation(judged, job.teacher_params, batch)
        before = jax.tree.leaves(state)
        for _ in range(2):
            state, metrics = step.train(state, job.teacher_params, step.put(job.source.next()))
        assert all(x.is_deleted() for x in before if x.ndim)
        ends.append(jax.device_get((sums, state, metrics)))
        programs = step.train.func, step.sum_evaluation
        assert [isinstance(x, Ahead) and x.compiled for x in programs] == [ahead] * 2
    assert jax.tree.all(jax.tree.map(np.array_equal, *ends))
