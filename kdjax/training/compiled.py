"""XLA's account of a training step, compiled for arrays that nobody makes."""

import dataclasses
import logging
from typing import Any, NamedTuple

from kdjax.config import Config, settle_dtype
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.training.ahead import place_shapes, shape_batch
from kdjax.training.job import build_step
from kdjax.training.memory import Plan
from kdjax.training.pair import Pair
from kdjax.training.plan import STEP_PHASES, replace_settings
from kdjax.training.teachers import NoTeacher, Size, TeacherKind

_log = logging.getLogger("kdjax")


class Held(NamedTuple):
    """Bytes that a compiled step holds on a device."""

    arguments: Size
    temporaries: Size


def count_step(
    config: Config, pair: Pair, placement: Placement, kind: TeacherKind, platform: str = ""
) -> Held:
    """Compiles a step of text on one device from its models' headers and returns what it holds.

    `kind` runs in the step, or is none. `platform` is JAX's name of a device that is not here.
    """
    placement = dataclasses.replace(placement, shapes=True)
    teacher, step, _ = build_step(config, pair, placement, kind)
    batch = shape_batch(config.train.batch_size, config.data.seq_len, step.trained_vocabulary)
    inputs = step.abstract, teacher.params if teacher else {}, batch
    placed = place_shapes((*inputs, step.fixed), sharding.replicated(placement.mesh))
    traced = step.jitted.trace(*placed[:3], **placed[3])
    lowered = traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()
    used: Any = lowered.compile().memory_analysis()
    return Held(used.argument_size_in_bytes, used.temp_size_in_bytes)


def ask_xla(plan: Plan, config: Config, pair: Pair, placement: Placement) -> Plan:
    """The plan with XLA's account of its step in place of the formula's, on a CPU.

    On a GPU, for several devices and with a cached teacher the formula stands.
    """
    known = plan.kind.runs or isinstance(plan.kind, NoTeacher)
    if plan.platform != "cpu" or not placement.alone or not known:
        return plan
    _log.info("compiling the step, whose memory XLA tells")
    settled = settle_dtype(config, plan.platform)
    settled = replace_settings(settled, plan.remat, plan.chunk_tokens)
    settled.student.imatrix = settled.student.start = ""  # files that no step reads
    held = count_step(settled, pair, placement, plan.kind)
    others = {name: parts for name, parts in plan.phases.items() if name not in STEP_PHASES}
    step = {"a step runs": {"temporaries, as XLA compiles it": held.temporaries}}
    return dataclasses.replace(plan, phases=step | others)
