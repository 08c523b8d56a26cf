"""Divergences as values: distances of two distributions over the same ids, at each position.

Each takes float32 log-probabilities of teacher and student at the loss's temperature and returns
one number for each position. `as_divergence` makes a value of a user-defined function
`f(teacher_log_probs, student_log_probs)`.

Letters: B rows, T positions, D hidden width, V vocabulary. In formulas t and s are the teacher's
and the student's probabilities.
"""

import dataclasses
import functools
import hashlib
import math
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kdjax.config import check_share, check_weights, split_divergence, split_function
from kdjax.errors import MissingFileError, UserError, suggest, suggest_path

AnyArray = Array | np.ndarray  # the public, unreduced functions take NumPy arrays as well
LogProbs = Float[AnyArray, "*B V"]
PerPosition = Float[Array, "*B"]
PerId = Float[Array, "*B V"]
DivergenceFunction = Callable[..., Array]  # f(teacher_log_probs, student_log_probs)


def log_softmax(logits: Float[AnyArray, "*B V"], temperature: float | Array) -> PerId:
    """Log-probabilities at the temperature, float32."""
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature, axis=-1)


def kl_divergence(teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
    """KL(teacher || student) in nats from float32 log-probabilities.

    Adding p_s - p_t (which sums to zero) makes every term non-negative: rounding in the normalisers
    then cannot turn a KL of 1e-4 over 151,936 ids negative.
    """
    p_t, p_s = jnp.exp(teacher_log_probs), jnp.exp(student_log_probs)
    return jnp.sum(p_t * (teacher_log_probs - student_log_probs) + (p_s - p_t), axis=-1)


def _log_mixture(a: AnyArray, b: AnyArray, share: float) -> Array:
    """log(share e^a + (1 - share) e^b)."""
    return jnp.logaddexp(a + math.log(share / (1 - share)), b) + math.log(1 - share)


def acceptance(teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
    """Sum of min(t, s), which is 1 - total variation: the share of the student's drafts accepted.

    Speculative sampling from t accepts a token drawn from s with probability min(1, t / s)
    (Leviathan, Kalman, Matias 2023, arXiv:2211.17192, theorem 3.5).
    """
    least = jnp.minimum(jnp.asarray(teacher_log_probs), jnp.asarray(student_log_probs))
    return jnp.sum(jnp.exp(least), axis=-1)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Distance of a student's distribution from its teacher's; hashable, so static under jit.

    Subclasses define `__call__`, and `slope` where its derivative is known.
    """

    # Whether it is also defined over merged outcomes, and merging never raises it. A cache of the
    # teacher's top-k ids merges all other ids into one outcome.
    merges_tail: ClassVar[bool] = False
    # Bytes of an id at a position on the way to its gradient, as XLA counts for an H100; 0: the
    # gradient is made of the logits at once. By default the most that any known one takes.
    gradient_bytes: ClassVar[int] = 8

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        """One number a position, from finite float32 log-probabilities."""
        raise NotImplementedError

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId | None:
        """d divergence / d (student probability), up to a constant a position; None: unknown."""
        return None

    def logit_gradient(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """d divergence / d (student logits / T): by `slope` and the softmax, or by `jax.vjp`."""
        p = jnp.exp(student_log_probs)
        slope = self.slope(teacher_log_probs, student_log_probs)
        if slope is not None:
            return p * (slope - jnp.sum(p * slope, axis=-1, keepdims=True))
        value, vjp = jax.vjp(lambda s: self(teacher_log_probs, s), student_log_probs)
        (g,) = vjp(jnp.ones_like(value))
        return g - p * jnp.sum(g, axis=-1, keepdims=True)

    def merged_gradient(
        self, teacher_log_probs: LogProbs, student_log_probs: LogProbs
    ) -> tuple[Float[Array, "*B V-1"], Float[Array, "*B 1"]]:
        """The logit gradient where the last outcome is all other ids together.

        Returns that of the outcomes before the last, and for each other id the factor that
        multiplies its probability.
        """
        g = self.logit_gradient(teacher_log_probs, student_log_probs)
        return g[..., :-1], g[..., -1:] / jnp.exp(student_log_probs[..., -1:])


@dataclasses.dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(t || s), nats (Hinton, Vinyals, Dean 2015, arXiv:1503.02531)."""

    merges_tail: ClassVar[bool] = True
    gradient_bytes: ClassVar[int] = 0

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        return kl_divergence(teacher_log_probs, student_log_probs)

    def logit_gradient(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """s - t."""
        return jnp.exp(student_log_probs) - jnp.exp(teacher_log_probs)

    def merged_gradient(
        self, teacher_log_probs: LogProbs, student_log_probs: LogProbs
    ) -> tuple[Float[Array, "*B V-1"], Float[Array, "*B 1"]]:
        """Gradient of the tail's ids: s_j - t_tail s_j / s_tail."""
        tail = 1 - jnp.exp((teacher_log_probs - student_log_probs)[..., -1:])
        return self.logit_gradient(teacher_log_probs, student_log_probs)[..., :-1], tail


@dataclasses.dataclass(frozen=True)
class ReverseKL(Divergence):
    """KL(s || t), nats (Gu et al. 2023, MiniLLM, arXiv:2306.08543)."""

    merges_tail: ClassVar[bool] = True
    gradient_bytes: ClassVar[int] = 0

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        return kl_divergence(student_log_probs, teacher_log_probs)

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """log(s / t)."""
        return jnp.subtract(student_log_probs, teacher_log_probs)


@dataclasses.dataclass(frozen=True)
class JensenShannon(Divergence):
    """beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s, nats.

    GKD's generalised form (Agarwal et al. 2023, arXiv:2306.13649), 0 < beta < 1; at 1/2 at most
    ln 2. `UserError` for another beta.
    """

    beta: float = 0.5
    merges_tail: ClassVar[bool] = True
    gradient_bytes: ClassVar[int] = 4

    def __post_init__(self):
        check_share("beta", self.beta)

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        m = _log_mixture(teacher_log_probs, student_log_probs, self.beta)
        ours, theirs = (kl_divergence(x, m) for x in (student_log_probs, teacher_log_probs))
        return (1 - self.beta) * ours + self.beta * theirs

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """(1 - beta) log(s / m)."""
        m = _log_mixture(teacher_log_probs, student_log_probs, self.beta)
        return (1 - self.beta) * jnp.subtract(student_log_probs, m)


@dataclasses.dataclass(frozen=True)
class SkewedForwardKL(Divergence):
    """KL(t || skew t + (1 - skew) s), nats (Ko et al. 2024, DistiLLM, arXiv:2402.03898).

    0 < skew < 1, else `UserError`; finite, at most log(1 / skew), where the student excludes ids.
    """

    skew: float = 0.1
    merges_tail: ClassVar[bool] = True

    def __post_init__(self):
        check_share("skew", self.skew)

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        mixture = _log_mixture(teacher_log_probs, student_log_probs, self.skew)
        return kl_divergence(teacher_log_probs, mixture)

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """(1 - skew) (1 - t / m)."""
        mixture = _log_mixture(teacher_log_probs, student_log_probs, self.skew)
        return -(1 - self.skew) * jnp.expm1(teacher_log_probs - mixture)


@dataclasses.dataclass(frozen=True)
class SkewedReverseKL(Divergence):
    """KL(s || skew s + (1 - skew) t), nats, as `SkewedForwardKL` with the sides exchanged."""

    skew: float = 0.1
    merges_tail: ClassVar[bool] = True

    def __post_init__(self):
        check_share("skew", self.skew)

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        mixture = _log_mixture(student_log_probs, teacher_log_probs, self.skew)
        return kl_divergence(student_log_probs, mixture)

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """log(s / m) - skew s / m."""
        mixture = _log_mixture(student_log_probs, teacher_log_probs, self.skew)
        below = jnp.subtract(student_log_probs, mixture)
        return below - self.skew * jnp.expm1(below)


@dataclasses.dataclass(frozen=True)
class TotalVariation(Divergence):
    """Half the sum of |t - s|, between 0 and 1 (Wen et al. 2023, f-DISTILL, arXiv:2307.15190)."""

    merges_tail: ClassVar[bool] = True
    gradient_bytes: ClassVar[int] = 0

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        return 0.5 * jnp.sum(jnp.abs(jnp.exp(teacher_log_probs) - jnp.exp(student_log_probs)), -1)

    def slope(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """Half the sign of s - t."""
        return 0.5 * jnp.sign(student_log_probs - teacher_log_probs)


@dataclasses.dataclass(frozen=True, init=False)
class Mixture(Divergence):
    """A weighted sum of divergences, `Mixture(((0.7, forward_kl), (0.3, total_variation)))`.

    Parts are what `as_divergence` takes. `UserError` unless their weights are above 0 and add up
    to 1.
    """

    parts: tuple[tuple[float, Divergence], ...]

    def __init__(self, parts: Iterable[tuple[float, Divergence | DivergenceFunction | str]]):
        whole = tuple((weight, as_divergence(part)) for weight, part in parts)
        check_weights([weight for weight, _ in whole])
        object.__setattr__(self, "parts", whole)

    @property
    def merges_tail(self) -> bool:  # type: ignore[override]
        """Whether all parts merge tails."""
        return all(divergence.merges_tail for _, divergence in self.parts)

    def _add(self, values: Iterable[Array]) -> Array:
        weights = [weight for weight, _ in self.parts]
        return sum((w * x for w, x in zip(weights, values, strict=True)), jnp.zeros(()))

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        return self._add(part(teacher_log_probs, student_log_probs) for _, part in self.parts)

    def logit_gradient(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """Weighted sum of the parts' gradients."""
        sides = teacher_log_probs, student_log_probs
        return self._add(part.logit_gradient(*sides) for _, part in self.parts)

    def merged_gradient(
        self, teacher_log_probs: LogProbs, student_log_probs: LogProbs
    ) -> tuple[Float[Array, "*B V-1"], Float[Array, "*B 1"]]:
        """Weighted sum of the parts' merged gradients."""
        sides = teacher_log_probs, student_log_probs
        inside, tail = zip(*(part.merged_gradient(*sides) for _, part in self.parts), strict=True)
        return self._add(inside), self._add(tail)


@dataclasses.dataclass(frozen=True)
class FunctionDivergence(Divergence):
    """A user's function, with `jax.vjp`'s gradient.

    Raises `UserError` if it does not return one number a position. It is defined over merged
    outcomes if it has an attribute `merges_tail` that is true.
    """

    function: DivergenceFunction
    merges_tail: bool = dataclasses.field(default=False, kw_only=True)

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        value = jnp.asarray(self.function(teacher_log_probs, student_log_probs), jnp.float32)
        if value.shape != student_log_probs.shape[:-1]:
            raise UserError(
                f"a divergence returns one number a position: {self.function} of log-probabilities "
                f"{student_log_probs.shape} returned {value.shape} instead of "
                f"{student_log_probs.shape[:-1]}. Sum over the last axis only."
            )
        return value


@dataclasses.dataclass(frozen=True)
class FileDivergence(Divergence):
    """A function, or a `Divergence`, of a user's Python file; `source` is such as `mine.py:f`."""

    source: str
    sha256: str  # of the file, as it was run
    divergence: Divergence

    @property
    def merges_tail(self) -> bool:  # type: ignore[override]
        """Whether what the file defines merges tails."""
        return self.divergence.merges_tail

    @property
    def gradient_bytes(self) -> int:  # type: ignore[override]
        """Bytes of what the file defines."""
        return self.divergence.gradient_bytes

    def __call__(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerPosition:
        return self.divergence(teacher_log_probs, student_log_probs)

    def logit_gradient(self, teacher_log_probs: LogProbs, student_log_probs: LogProbs) -> PerId:
        """Calls what the file defines."""
        return self.divergence.logit_gradient(teacher_log_probs, student_log_probs)

    def merged_gradient(
        self, teacher_log_probs: LogProbs, student_log_probs: LogProbs
    ) -> tuple[Float[Array, "*B V-1"], Float[Array, "*B 1"]]:
        """Calls what the file defines."""
        return self.divergence.merged_gradient(teacher_log_probs, student_log_probs)


def _open_function(source: str, file: str, name: str) -> FileDivergence:
    """Runs a user's file and takes the function; one object for a file that has not changed."""
    try:
        code = Path(file).read_bytes()
    except FileNotFoundError:
        raise MissingFileError(
            f"loss.divergence={source}: no such file; expected a Python file that defines {name}."
            f"{suggest_path(file)}"
        ) from None
    return _run_file(source, file, name, code)


@functools.cache
def _run_file(source: str, file: str, name: str, code: bytes) -> FileDivergence:
    module = types.ModuleType(Path(file).stem)
    module.__file__ = file
    try:
        exec(compile(code, file, "exec"), vars(module))
    except Exception as error:  # user code: name its line
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
        where = f"{file}:{line}" if line else file
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        mine = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UserError(
            f"loss.divergence={source}: {file} defines no {name}; expected a function of two "
            f"log-probabilities.{suggest(name, mine)}"
        )
    found: Any = vars(module)[name]
    if not isinstance(found, Callable):
        raise UserError(
            f"loss.divergence={source}: found {name}={found!r}; expected a function of two "
            "log-probabilities, or a Divergence."
        )
    divergence = as_divergence(vars(module)[name])
    return FileDivergence(source, hashlib.sha256(code).hexdigest(), divergence)


def list_files(divergence: Divergence) -> dict[str, str]:
    """SHA-256s of the files of a divergence, by its parts' names, such as `mine.py:f`."""
    if isinstance(divergence, Mixture):
        files = (list_files(part) for _, part in divergence.parts)
        return {source: sha for one in files for source, sha in one.items()}
    return {divergence.source: divergence.sha256} if isinstance(divergence, FileDivergence) else {}


forward_kl = ForwardKL()
"""KL(teacher || student), the value of `ForwardKL`."""
reverse_kl = ReverseKL()
"""KL(student || teacher), the value of `ReverseKL`."""
jensen_shannon = JensenShannon()
"""The Jensen-Shannon divergence, the value of `JensenShannon` at beta 1/2."""
total_variation = TotalVariation()
"""Half the sum of |teacher - student|, the value of `TotalVariation`."""

# By the names of `config.DIVERGENCES`.
_CLASSES: dict[str, type[Divergence]] = {
    "forward_kl": ForwardKL,
    "reverse_kl": ReverseKL,
    "jsd": JensenShannon,
    "skewed_forward_kl": SkewedForwardKL,
    "skewed_reverse_kl": SkewedReverseKL,
    "total_variation": TotalVariation,
}


def parse_divergence(text: str) -> Divergence:
    """Parses a config's text, such as "jsd:beta=0.3" or "0.7*forward_kl+0.3*total_variation".

    A function of a file, "mine.py:f", is imported: this runs the file. Raises `UserError` for an
    unknown name or parameter, and for a file that fails or lacks the function.
    """
    parts: list[tuple[float, Divergence]] = []
    for weight, name, parameters in split_divergence(text):
        if function := split_function(name):
            parts.append((weight, _open_function(name, *function)))
        else:
            parts.append((weight, _CLASSES[name](**parameters)))
    return Mixture(tuple(parts)) if len(parts) > 1 else parts[0][1]


def write_divergence(divergence: Divergence) -> str | None:
    """Writes a divergence as `parse_divergence` reads it; None for a user-defined one."""
    if isinstance(divergence, Mixture):
        parts = [(weight, write_divergence(part)) for weight, part in divergence.parts]
        whole = all(text and "*" not in text for _, text in parts)
        return "+".join(f"{weight!r}*{text}" for weight, text in parts) if whole else None
    if isinstance(divergence, FileDivergence):
        return divergence.source
    name = next((name for name, kind in _CLASSES.items() if type(divergence) is kind), None)
    values = ",".join(f"{key}={value!r}" for key, value in vars(divergence).items())
    return name and (f"{name}:{values}" if values else name)


def as_divergence(divergence: Divergence | DivergenceFunction | str) -> Divergence:
    """Makes a `Divergence` of one, of a function of two log-probabilities, or of a text."""
    if isinstance(divergence, Divergence):
        return divergence
    if isinstance(divergence, str):
        return parse_divergence(divergence)
    if isinstance(divergence, type) or not callable(divergence):
        raise UserError(
            f"divergence={divergence!r}: must be a Divergence such as JensenShannon(0.5), one's "
            "name, or a function f(teacher_log_probs, student_log_probs) -> one number a position"
        )
    merges_tail = bool(getattr(divergence, "merges_tail", False))
    return FunctionDivergence(divergence, merges_tail=merges_tail)
