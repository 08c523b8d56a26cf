"""The distillation loss of logits, unreduced; `chunked` computes it from hidden states.

    loss = alpha * CE(student, labels) + (1 - alpha) * T^2 * D(teacher_T, student_T)

alpha weighs the cross-entropy with the labels; T softens both distributions; T^2 keeps the
gradient's size independent of T (Hinton, Vinyals, Dean 2015, arXiv:1503.02531, section 2). D is a
value of `divergences`, KL(teacher || student) unless told otherwise.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kdjax.errors import UserError
from kdjax.losses.divergences import (
    AnyArray,
    Divergence,
    DivergenceFunction,
    as_divergence,
    forward_kl,
    log_softmax,
)
from kdjax.models.kernels import softmax
from kdjax.models.weights import mask_padding

Amount = TypeVar("Amount", float, Array)
Schedule = Callable[[Any], Any]  # of the optimizer step, as optax has them
_END = 2**30  # a step at which a schedule has its last value


class Schedules(NamedTuple):
    """Values that change with the optimizer step; None: it does not change."""

    temperature: Schedule | None
    alpha: Schedule | None


@dataclasses.dataclass(frozen=True, init=False)
class KDLoss:
    """The minimised loss: divergence, temperature, and the cross-entropy's weight; hashable.

    `KDLoss(jensen_shannon, temperature=2.0, alpha=0.1)`. In place of a `Divergence` its name in
    configs does, or a function f(teacher_log_probs, student_log_probs) -> one number a position.
    For `make_step` temperature and alpha may be schedules, functions of the optimizer step such as
    optax's, of which held-out figures have the last values.
    `UserError` for a temperature that is not above 0 or an alpha outside 0 to 1.
    """

    divergence: Divergence
    temperature: Any  # float, or a `Schedule` until `settle`
    alpha: Any  # likewise; 1 trains without the teacher

    def __init__(
        self,
        divergence: Divergence | DivergenceFunction | str = forward_kl,
        temperature: float | int | Schedule = 1.0,
        alpha: float | int | Schedule = 0.0,
    ):
        object.__setattr__(self, "divergence", as_divergence(divergence))
        for name, value in (("temperature", temperature), ("alpha", alpha)):
            if not callable(value):
                value = _check_amount(name, value)
            object.__setattr__(self, name, value)

    def settle(self) -> tuple["KDLoss", Schedules | None]:
        """Returns the loss with its schedules' last values, and the schedules; None without any.

        Raises `UserError` for a schedule whose first or last value cannot be.
        """
        schedules = Schedules(
            *(value if callable(value) else None for value in (self.temperature, self.alpha))
        )
        if schedules == (None, None):
            return self, None
        settled: dict[str, float] = {}
        for name in Schedules._fields:
            value: Any = getattr(self, name)
            if callable(value):
                first, last = (float(jnp.asarray(value(step))) for step in (0, _END))
                _check_amount(f"{name} at step 0", first, name)
                value = _check_amount(f"{name} at its end", last, name)
            settled[name] = value
        return KDLoss(self.divergence, **settled), schedules

    @property
    def has_ce(self) -> bool:
        """Whether the cross-entropy counts."""
        return self.alpha > 0

    @property
    def has_divergence(self) -> bool:
        """Whether the divergence counts."""
        return self.alpha < 1

    def without_teacher(self) -> "KDLoss":
        """The same without a divergence that could see two equal sides."""
        return KDLoss(alpha=self.alpha)

    def combine(self, ce: Amount, divergence: Amount) -> Amount:
        """The loss of a cross-entropy and a divergence at T: arrays or numbers, nats."""
        return self.alpha * ce + (1 - self.alpha) * self.temperature**2 * divergence

    @property
    def gradient_scale(self) -> float:
        """(1 - alpha) T: what `Divergence.logit_gradient`, for logits / T, is multiplied with."""
        return (1 - self.alpha) * self.temperature


def _check_amount(label: str, value: Any, name: str = "") -> float:
    """A temperature or an alpha, `name` or else `label`, as a float; `UserError` for another."""
    if not isinstance(value, Real):
        raise UserError(f"{label}={value!r}: must be a number")
    amount = float(value)
    if (name or label) == "temperature" and not 0 < amount < float("inf"):
        raise UserError(f"{label}={value!r}: must be greater than 0")
    if (name or label) == "alpha" and not 0 <= amount <= 1:
        raise UserError(f"{label}={value!r}: must be between 0 and 1")
    return amount


@dataclasses.dataclass(frozen=True)
class WeighedLoss:
    """A `KDLoss` within a step whose weights differ by position: arrays `[B, C]`."""

    divergence: Divergence
    ce_weights: Array  # alpha times the weight of the position's cross-entropy
    divergence_weights: Array  # 1 - alpha, times the weight of its divergence
    temperatures: Array | float
    has_ce: bool = True
    has_divergence: bool = True

    @property
    def alpha(self) -> Array:
        """Each position's alpha, shaped to multiply its logits: `[B, C, 1]`."""
        return self.ce_weights[..., None]

    @property
    def temperature(self) -> Array | float:
        """Each position's temperature, `[B, C, 1]`, or one number for all."""
        if isinstance(self.temperatures, int | float):
            return self.temperatures
        return self.temperatures[..., None]

    @property
    def gradient_scale(self) -> Array:
        """Each position's `KDLoss.gradient_scale`, `[B, C, 1]`."""
        return (self.divergence_weights * self.temperatures)[..., None]

    def combine(self, ce: Array, divergence: Array) -> Array:
        """Each position's `KDLoss.combine`."""
        return self.ce_weights * ce + self.divergence_weights * self.temperatures**2 * divergence

    def without_teacher(self) -> "WeighedLoss":
        """The loss without a divergence, which might fail on two equal sides."""
        return dataclasses.replace(self, divergence=forward_kl)


def _check_inputs(student: AnyArray, teacher: AnyArray, labels: AnyArray) -> None:
    """Raises `UserError` for shapes that differ and for labels outside the vocabulary.

    A vocabulary of 1 would be broadcast, and label -100 would be the 100th id from the end. Labels
    within `jax.jit` have no values to check.
    """
    if student.shape != teacher.shape:
        raise UserError(
            f"the student's logits are {list(student.shape)} and the teacher's "
            f"{list(teacher.shape)}: both must span the same V ids. Cut the wider vocabulary."
        )
    if labels.shape != student.shape[:-1]:
        raise UserError(
            f"labels are {list(labels.shape)}: must be {list(student.shape[:-1])}, one a position "
            "of the logits"
        )
    if isinstance(labels, Tracer) or not labels.size:
        return
    least, most = int(np.min(labels)), int(np.max(labels))
    if not 0 <= least <= most < student.shape[-1]:
        raise UserError(
            f"labels are from {least} to {most}: must be ids from 0 to {student.shape[-1] - 1}. "
            "Give positions without a label any id, and leave their losses out of the sum."
        )


def cross_entropy(
    logits: Float[AnyArray, "*B V"], labels: Int[AnyArray, "*B"]
) -> Float[Array, "*B"]:
    """Negative log-likelihood of the labels in nats, in float32, at temperature 1."""
    logits = jnp.asarray(logits, jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def kd_loss(
    student_logits: Float[AnyArray, "*B V"],
    teacher_logits: Float[AnyArray, "..."],
    labels: Int[AnyArray, "..."],
    loss: KDLoss | None = None,
    **settings: Any,
) -> Float[Array, "*B"]:
    """The distillation loss of each position, nats, float32, unreduced; no gradient to the teacher.

    `loss`, or the fields of one: `kd_loss(s, t, labels, temperature=2.0, alpha=0.1)`. Both logits
    are [*B V] and labels [*B], else `UserError`: slice a wider teacher before calling.
    """
    loss = loss or KDLoss(**settings)
    _check_inputs(student_logits, teacher_logits, labels)
    teacher = jax.lax.stop_gradient(log_softmax(teacher_logits, loss.temperature))
    soft = loss.divergence(teacher, log_softmax(student_logits, loss.temperature))
    return loss.combine(cross_entropy(student_logits, labels), soft)


def kd_logit_gradient(
    student_logits: Float[AnyArray, "*B V"],
    teacher_logits: Float[AnyArray, "..."],
    labels: Int[AnyArray, "..."],
    loss: KDLoss | None = None,
    **settings: Any,
) -> Float[Array, "*B V"]:
    """d kd_loss / d student_logits: alpha (p - onehot) + (1 - alpha) T G, float32.

    G is the divergence's gradient to student_logits / T; for the forward KL it is p_T - q_T,
    softened student minus softened teacher (Hinton et al. 2015, equation 2, times T^2). Raises as
    `kd_loss`.
    """
    loss = loss or KDLoss(**settings)
    _check_inputs(student_logits, teacher_logits, labels)
    teacher = log_softmax(teacher_logits, loss.temperature)
    student = log_softmax(student_logits, loss.temperature)
    return _logit_gradient(jnp.asarray(student_logits, jnp.float32), teacher, student, labels, loss)


def _logit_gradient(
    student_logits: Array,
    teacher: Array,
    student: Array,
    labels: AnyArray,
    loss: KDLoss | WeighedLoss,
) -> Array:
    """`kd_logit_gradient`; `teacher` and `student` are log-probabilities at the temperature."""
    is_label = jax.nn.one_hot(labels, student_logits.shape[-1], dtype=jnp.float32)
    hard = jax.nn.softmax(student_logits, axis=-1) - is_label
    if not loss.has_divergence:  # even 0 times the gradient of a user's divergence may be NaN
        return hard
    soft = loss.divergence.logit_gradient(teacher, student)
    return loss.alpha * hard + loss.gradient_scale * soft


def softmax_sums(
    student: Float[Array, "*B V"],
    teacher: Float[Array, "*B W"] | None,
    temperature: float | Array,
    real: int,
    *,
    fused: bool = False,
) -> softmax.SoftmaxSums:
    """Sums that the loss needs of the first `real` of each row's float32 logits, at most W.

    With `fused` the kernel reads each of these once.
    """
    if fused:
        assert isinstance(temperature, float)
        return softmax.softmax_sums(student, teacher, temperature, real)

    def below_peak(logits: Array) -> tuple[Array, Array]:
        logits = mask_padding(logits, real)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        return peak, logits - peak

    total = functools.partial(jnp.sum, axis=-1, keepdims=True)
    peak, x = below_peak(student if teacher is None else student[..., : teacher.shape[-1]])
    ours = softmax.SoftmaxSums(peak, total(jnp.exp(x)), total(jnp.exp(x / temperature)))
    if teacher is None:
        return ours
    their_peak, y = below_peak(teacher)
    x, y = x / temperature, y / temperature
    distance = total(jnp.exp(y) * (y - x))
    return ours._replace(teacher_peak=their_peak, teacher_soft=total(jnp.exp(y)), distance=distance)


def _widen(gradient: Float[Array, "*B W"], width: int) -> Float[Array, "*B V"]:
    """The gradient with zeros for further columns, up to `width`."""
    room = ((0, 0),) * (gradient.ndim - 1) + ((0, max(0, width - gradient.shape[-1])),)
    return jnp.pad(gradient, room)


def kd_parts_and_gradient(
    student_logits: Float[Array, "*B V"],
    teacher_logits: Float[Array, "..."],
    labels: Int[Array, "*B"],
    loss: KDLoss | WeighedLoss,
    *,
    real: int,
    shared: int | None = None,
    fused: bool = False,
) -> tuple[Float[Array, "*B"], Float[Array, "*B"], Float[Array, "*B V"]]:
    """Cross-entropy, divergence and `kd_logit_gradient` of float32 logits, together.

    Ids from `real` on do not exist, whatever their logits. For the forward KL each logit is read
    three times: for the maxima, for the sums, and for the gradient; twice on a GPU if `fused`. At
    16,384 positions of 151,936 ids a reading of both models' takes 4.6 ms of an H200. Any other
    divergence sees the log-probabilities of the ids that exist, and no others. With `shared`, for
    the forward KL alone, teacher_logits are [*B W], W at least `shared`: see
    `shared_parts_and_gradient`.
    """
    if shared is None:
        _check_inputs(student_logits, teacher_logits, labels)
        shared = real
    alpha, temperature = loss.alpha, loss.temperature
    if loss.divergence != forward_kl:
        student_raw, teacher_raw = student_logits[..., :real], teacher_logits[..., :real]
        ours, theirs = (log_softmax(x, temperature) for x in (student_raw, teacher_raw))
        gradient = _logit_gradient(student_raw, theirs, ours, labels, loss)
        gradient = _widen(gradient, student_logits.shape[-1])
        return cross_entropy(student_raw, labels), loss.divergence(theirs, ours), gradient
    sums = softmax_sums(student_logits, teacher_logits, temperature, shared, fused=fused)
    student_logits = mask_padding(student_logits, real)
    theirs = mask_padding(teacher_logits, shared)
    ours = student_logits  # masked once more, its exponentials would be computed twice
    z, distance, their_peak = sums.teacher_soft, sums.distance, sums.teacher_peak
    assert z is not None and distance is not None and their_peak is not None
    # Both sides start from their own maximum, so what cancels here is of order 1, not 30.
    kl = jnp.maximum(distance / z - jnp.log(z) + jnp.log(sums.soft), 0.0)
    chosen = jnp.take_along_axis(student_logits, labels[..., None], axis=-1)
    # Without a barrier XLA would write out the exponentials of the sums and read them back here.
    soft_peak, their_peak = jax.lax.optimization_barrier((sums.peak, their_peak))
    peak, total = soft_peak, sums.hard
    if shared < real:
        ours = mask_padding(ours[..., : theirs.shape[-1]], shared)
        rest = softmax_sums(student_logits[..., shared:], None, 1.0, real - shared)
        peak = jax.lax.optimization_barrier(jnp.maximum(sums.peak, rest.peak))
        both = (sums.hard, sums.peak), (rest.hard, rest.peak)
        total = sum((x * jnp.exp(of - peak) for x, of in both), jnp.zeros(()))
    ce = jnp.log(total) + peak - chosen
    hard = student_logits - peak
    gradient = jnp.zeros_like(hard)
    # Reciprocals of sums, not quotients of numbers: a division of every logit costs an H200 more
    # than its exponential.
    if loss.has_ce:
        is_label = jax.nn.one_hot(labels, hard.shape[-1], dtype=jnp.float32)
        gradient += alpha * (jnp.exp(hard) * (1 / total) - is_label)
    if loss.has_divergence:
        p = jnp.exp((ours - soft_peak) / temperature) * (1 / sums.soft)
        q = jnp.exp((theirs - their_peak) / temperature) * (1 / z)
        gradient += _widen(loss.gradient_scale * (p - q), hard.shape[-1])
    return ce[..., 0], kl[..., 0], gradient


def shared_parts_and_gradient(
    student_logits: Float[Array, "*B V"],
    teacher_logits: Float[Array, "*B W"],
    labels: Int[Array, "*B"],
    loss: KDLoss | WeighedLoss,
    *,
    real: int,
    shared: int,
    fused: bool = False,
) -> tuple[Float[Array, "*B"], Float[Array, "*B"], Float[Array, "*B V"]]:
    """Computes `kd_parts_and_gradient` of vocabularies that have the first `shared` ids in common.

    The cross-entropy is over all `real` ids of the student. The divergence is over the shared ids,
    on which both sides are normalised again; other columns of the teacher are not read.
    """
    inputs = student_logits, teacher_logits, labels, loss
    if shared == real:
        return kd_parts_and_gradient(*inputs, real=real, fused=fused)
    if fused and loss.divergence == forward_kl:  # on a CPU the sums below are quicker
        return kd_parts_and_gradient(*inputs, real=real, shared=shared, fused=True)
    ours, theirs = (
        log_softmax(x[..., :shared], loss.temperature) for x in (student_logits, teacher_logits)
    )
    logits = mask_padding(student_logits, real)
    gradient = jnp.zeros_like(logits)
    if loss.has_ce:
        is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
        gradient += loss.alpha * (jax.nn.softmax(logits, axis=-1) - is_label)
    if loss.has_divergence:
        soft = loss.gradient_scale * loss.divergence.logit_gradient(theirs, ours)
        gradient += _widen(soft, logits.shape[-1])
    return cross_entropy(logits, labels), loss.divergence(theirs, ours), gradient
