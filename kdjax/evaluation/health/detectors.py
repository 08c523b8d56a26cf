"""Ways in which a model can be broken, each with its evidence; see docs/health.md.

A detector takes plain numbers and returns its evidence, or None, so that each can be tested on a
broken model. Thresholds lie far from both sides: docs/records/2026-11-21-detectors.md has the
measurements. Evidence means broken, not weak: a merely bad model has none.
"""

import dataclasses
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kdjax.models.arch import ArchSpec
from kdjax.models.decoding import Completion
from kdjax.models.tokenizer import Tokenizer

DEAD = 1e-3  # share of the root mean square of the norms of a matrix's rows
DEAD_ROWS, SAME_ROWS = 0.25, 0.25  # published tables have some thousand rows that never trained
UNIFORM = 0.98  # of the entropy of a uniform distribution
CHANCE = 0.85  # of a uniform guess's CE; 0.1 for the published 0.5B, 0.9 with random embeddings
CONTEXT_NATS = 0.05  # mutual information between text and prediction
PEERS = 4  # layers needed to say what is usual
# Of a matrix's norm to the median of its peers'. Published 0.5B and 1.5B: 3.4 at most, for norms'
# weights 23, for biases 105, which are not looked at.
UNLIKE, UNLIKE_VECTOR = 10.0, 200.0
SPREADS = 8.0  # median absolute deviations (of logs, 0.1 added); 4.5 in these files, vectors 9.2
NOISE, TRAINED, TRAINED_LEAST = 1.06, 1.5, 1.2  # largest singular value over that of noise
LARGE_ROW = 100.0  # of the median norm; 35 in the published 0.5B
LAYOUT_GAIN, LAYOUT_CE = 0.5, 0.2  # nats; share of a uniform guess's CE
# CE that the right order leaves, as a share of a uniform guess's. Damage of another kind may cost
# less in a wrong order, but stays: the demo's teacher, 0.22, with a sign turned in a layer 0.61.
MENDED = 0.35
# Entropy as a share of CE, and CE as a share of a uniform guess's: published models 0.82 and 0.1,
# the demo's teacher 0.91 and 0.22, with its embedding four times as large 0.05 and 0.84.
SURE, WRONG = 0.25, 0.35
WEAK = 0.25  # share of a uniform guess's CE above which a model is called weak
# Nats from the teacher; and times what one bit less a weight costs: 0.03 to 0.1 nats from 4 and 5.
FAR_NATS, FAR_BITS = 0.2, 5.0
# Nats by which another theta explains text better, and standard errors. 1e5 for 1e6 costs 0.051
# (3.6 errors) in the 0.5B, 0.041 (3.3) in the 1.5B, whose 1e6 is 0.012 (1.6) worse than 5e6.
ROPE_GAIN, ROPE_SIGMAS = 0.03, 2.5
SPARE_ROWS, SPARE_SHARE = 1024, 0.05  # rows of the embedding beyond the last token
UNORDERED = 0.05  # of the merges; 0 in Qwen2.5
LOOP_SHARE, LOOP_PERIOD, LOOP_IDS = 0.5, 32, 48


@dataclasses.dataclass(frozen=True)
class Finding:
    """One reason to call a model broken."""

    detector: str
    evidence: str


def ask(*questions: tuple[Any, ...]) -> list[Finding]:
    """Collects findings of detectors with evidence; a question is a detector and its arguments."""
    answers = [(detector.__name__, detector(*about)) for detector, *about in questions]
    return [Finding(name, evidence) for name, evidence in answers if evidence]


@dataclasses.dataclass(frozen=True)
class MatrixStats:
    """Counts of one tensor, made by `weights.py`; rows are those of ids that some token has."""

    name: str
    kind: str  # shared with its peers, the same tensor of other layers; "" without peers
    size: int
    nan: int
    inf: int
    spread: float  # greatest finite number less the least
    norm: float  # root mean square of its numbers
    rows: int  # 0 unless a matrix
    dead_rows: int
    repeated_rows: int  # rows equal to an earlier one, dead ones left out
    large_row: int  # the row of the greatest norm
    large_norm: float  # its norm over the median norm
    noise: float  # largest singular value over noise's; 0 if not computed


def non_finite_weights(stats: Sequence[MatrixStats]) -> str | None:
    """NaN or infinity in any tensor."""
    bad = [s for s in stats if s.nan or s.inf]
    if not bad:
        return None
    shown = ", ".join(f"{s.name} ({s.nan:,} NaN, {s.inf:,} Inf of {s.size:,})" for s in bad[:3])
    return f"{len(bad)} of {len(stats)} tensors: {shown}"


def constant_weights(stats: Sequence[MatrixStats]) -> str | None:
    """A matrix of one number: never written, or zeroed. Norms and biases may be constant."""
    bad = [s.name for s in stats if s.rows and s.spread == 0 and not s.nan + s.inf]
    return f"{len(bad)} matrices hold one number: {', '.join(bad[:4])}" if bad else None


def dead_rows(stats: Sequence[MatrixStats]) -> str | None:
    """Rows near zero: ids that cannot be distinguished or predicted, units that do nothing."""
    return _name_worst({s: s.dead_rows for s in stats}, DEAD_ROWS, "are zero")


def repeated_rows(stats: Sequence[MatrixStats]) -> str | None:
    """A row that repeats: a broadcast or a failed resize."""
    return _name_worst({s: s.repeated_rows for s in stats}, SAME_ROWS, "repeat an earlier one")


def _name_worst(counts: Mapping[MatrixStats, int], most: float, verb: str) -> str | None:
    """Names the matrix with the largest share of counted rows, if it is more than `most`."""
    bad = [s for s, count in counts.items() if s.rows and count > most * s.rows and s.spread > 0]
    if not bad:
        return None
    worst = max(bad, key=lambda s: counts[s] / s.rows)
    return f"{worst.name}: {counts[worst]:,} of {worst.rows:,} rows {verb}{_count_others(bad)}"


def _count_others(bad: Sequence[object]) -> str:
    return f", and {len(bad) - 1} tensors more" if len(bad) > 1 else ""


def _peers(stats: Sequence[MatrixStats]) -> list[list[MatrixStats]]:
    """Groups tensors of one kind, if there are enough to compare."""
    kinds: dict[str, list[MatrixStats]] = {}
    for s in stats:
        if s.kind and not s.kind.endswith("bias") and not s.nan + s.inf:
            kinds.setdefault(s.kind, []).append(s)
    return [peers for peers in kinds.values() if len(peers) >= PEERS]


def unlike_peers(stats: Sequence[MatrixStats]) -> str | None:
    """A tensor that is far smaller or larger than its peers in other layers."""
    bad = []
    for peers in _peers(stats):
        logs = np.log(np.maximum([s.norm for s in peers], 1e-30))
        middle = float(np.median(logs))
        spread = 1.4826 * float(np.median(np.abs(logs - middle))) + 0.1
        for s, away in zip(peers, np.abs(logs - middle), strict=True):
            limit = math.log(UNLIKE if s.rows else UNLIKE_VECTOR)
            if (s.spread > 0 or not s.rows) and away > limit and away > SPREADS * spread:
                bad.append((away, s, math.exp(middle)))
    if not bad:
        return None
    _, worst, usual = max(bad, key=lambda found: found[0])
    return (
        f"{worst.name}: root mean square {worst.norm:.2g}, of the same tensor in other layers "
        f"{usual:.2g}{_count_others(bad)}"
    )


def noise_weights(stats: Sequence[MatrixStats]) -> str | None:
    """A matrix with the spectrum of noise, where every other layer's has learned something."""
    bad = []
    for peers in _peers(stats):
        noise = sorted(peers, key=lambda s: s.noise)
        learned = [s.noise for s in noise if s.noise > TRAINED_LEAST]
        # One layer, or a few, out of many: early in training noise is usual.
        if len(learned) < 0.75 * len(peers) or float(np.median(learned)) < TRAINED:
            continue
        rest = noise[: len(noise) - len(learned)]
        if rest and rest[-1].noise < NOISE:
            bad += [(s, float(np.median(learned))) for s in rest if s.spread > 0]
    if not bad:
        return None
    worst, usual = bad[0]
    return (
        f"{worst.name}: its largest singular value is {worst.noise:.2f} times noise's, in other "
        f"layers {usual:.2f}{_count_others(bad)}"
    )


def large_rows(stats: Sequence[MatrixStats]) -> str | None:
    """One row that outweighs all others of its matrix."""
    bad = [s for s in stats if s.rows and s.large_norm > LARGE_ROW]
    if not bad:
        return None
    worst = max(bad, key=lambda s: s.large_norm)
    return (
        f"{worst.name}: row {worst.large_row:,} has {worst.large_norm:,.0f} times the norm of the "
        f"median row{_count_others(bad)}"
    )


def unchanged_weights(changed: Mapping[str, bool], step: int) -> str | None:
    """Tensors of a trained checkpoint that equal their initial values to the last bit."""
    same = [name for name, differs in changed.items() if not differs]
    if not same or not step:
        return None
    shown = ", ".join(same[:4]) + (", ..." if len(same) > 4 else "")
    return f"after {step} steps {len(same)} of {len(changed)} tensors are as they began: {shown}"


@dataclasses.dataclass(frozen=True)
class LogitStats:
    """Figures of a model's predictions at every position of the probe text, float64."""

    positions: int
    non_finite: int  # positions with a NaN or infinite logit
    vocabulary: int  # ids that some token has
    entropy: float  # mean, nats
    mean_entropy: float  # of the mean distribution, nats
    ce: float  # of the text, nats a token


def non_finite_logits(stats: LogitStats) -> str | None:
    """NaN or infinity where numbers should be."""
    return f"at {stats.non_finite} of {stats.positions} positions" if stats.non_finite else None


def uniform_logits(stats: LogitStats) -> str | None:
    """Nearly uniform predictions: a head or final norm of zeros, or no training."""
    most = math.log(stats.vocabulary)
    if stats.non_finite or stats.entropy < UNIFORM * most:
        return None
    return f"entropy {stats.entropy:.3f} of at most {most:.3f} nats over {stats.vocabulary:,} ids"


def constant_logits(stats: LogitStats) -> str | None:
    """Predictions that do not depend on the context.

    Entropy of the mean distribution minus mean entropy is the mutual information of position and
    prediction: several nats for a language model, 0 for one that ignores its input.
    """
    information = stats.mean_entropy - stats.entropy
    if stats.non_finite or information >= CONTEXT_NATS:
        return None
    return f"predictions hold {max(information, 0):.4f} nats of the context"


def near_chance(ce: float, vocabulary: int, text: str, share: float = CHANCE) -> str | None:
    """CE near a uniform guess's: another model's tokenizer, tensors in the wrong place, or no
    training. `ce` is in nats a token; `share` is the limit as a share of the guess's."""
    chance = math.log(vocabulary)
    if not ce >= share * chance:
        return None
    return f"{ce:.2f} nats a token of {text}, a uniform guess has {chance:.2f}"


def sure_and_wrong(stats: LogitStats) -> str | None:
    """Predictions far more certain than correct: an embedding, head or norm was multiplied."""
    chance = math.log(stats.vocabulary)
    if stats.non_finite or not (stats.ce > WRONG * chance and stats.entropy < SURE * stats.ce):
        return None
    return (
        f"entropy {stats.entropy:.2f} nats where the CE is {stats.ce:.2f}: it is sure and wrong; "
        "some scale is too large"
    )


def far_from_teacher(kl: float, bit: float, text: str) -> str | None:
    """A form of the teacher that is further from it than rounding explains.

    `kl`, and `bit`, the cost of one bit less a weight to the teacher, are nats a token.
    """
    if not kl > max(FAR_NATS, FAR_BITS * bit):
        return None
    cost = f"one bit less a weight costs {bit:.2g}" if bit else "its weights are not rounded"
    return f"KL {kl:.2f} nats a token of {text} from the teacher whose form it is; {cost}"


_THETAS = (1e4, 1e5, 1e6)


def rope_theta(
    theta: float, ces: np.ndarray, ces_with: Callable[[float], np.ndarray]
) -> str | None:
    """Another theta makes text more likely: the weights were trained with that one.

    `ces_with(theta)` is the CE of each token of the probe text, in nats; `ces` is it at the file's
    theta. The tokens are compared in pairs: theta is the only difference.
    """
    if not np.all(np.isfinite(ces)):
        return None
    best = None
    for other in _THETAS:
        if math.isclose(other, theta, rel_tol=0.5):
            continue
        gains = ces - ces_with(other)
        error = float(np.std(gains)) / math.sqrt(len(gains))
        gain = float(np.mean(gains))
        if gain > max(ROPE_GAIN, ROPE_SIGMAS * error) and (best is None or gain > best[0]):
            best = gain, error, other
    if best is None:
        return None
    gain, error, other = best
    return (
        f"theta {theta:g} has {np.mean(ces):.3f} nats a token, {other:g} has "
        f"{np.mean(ces) - gain:.3f}, {gain:.3f} less (standard error {error:.3f})"
    )


def rope_layout(ce: float, vocabulary: int, ce_with: Callable[[str], float]) -> str | None:
    """A far lower CE with the rows of q and k in another order.

    Rotation pairs row i of a head with row i + D/2 (Hugging Face) or 2i with 2i + 1 (llama.cpp for
    llama): a converter that reorders once too often, or not at all, leaves a model that runs.
    `ce_with(order)` is the CE with rows taken to be in that order, "pairs" or "halves".
    """
    if (better := _better_order(ce, vocabulary, ("pairs", "halves"), ce_with)) is None:
        return None
    order, other = better
    return (
        f"{ce:.2f} nats a token, {other:.2f} with the rows of q and k taken as {order}: "
        "they lie in another order than the rotation expects"
    )


def gate_order(ce: float, vocabulary: int, ce_with: Callable[[str], float]) -> str | None:
    """A far lower CE with gate and up projections exchanged; `ce_with("gate and up")`."""
    if (better := _better_order(ce, vocabulary, ("gate and up",), ce_with)) is None:
        return None
    return f"{ce:.2f} nats a token, {better[1]:.2f} with gate and up projections exchanged"


def head_order(ce: float, vocabulary: int, ce_with: Callable[[str], float]) -> str | None:
    """A far lower CE with heads in the order in which queries and keys fit best.

    `ce_with(heads)` is the CE with "key" heads, or "key and value" heads, in that order.
    """
    heads = ("key and value", "key")
    if (better := _better_order(ce, vocabulary, heads, ce_with)) is None:
        return None
    return (
        f"{ce:.2f} nats a token, {better[1]:.2f} with {better[0]} heads in the order that fits "
        "the queries"
    )


def _better_order(
    ce: float, vocabulary: int, orders: Sequence[str], ce_with: Callable[[str], float]
) -> tuple[str, float] | None:
    """Finds the order of lowest CE, if that is far lower and a working model's."""
    chance = math.log(vocabulary)
    if not math.isfinite(ce) or ce < LAYOUT_CE * chance:
        return None
    order, best = min(((order, ce_with(order)) for order in orders), key=lambda pair: pair[1])
    return (order, best) if best < min(ce - LAYOUT_GAIN, MENDED * chance) else None


_ROUND_TRIP = (
    "def naïve(x):\n\treturn x ** 2  # 100%\r\n",
    "Grüße, мир, 世界, こんにちは, שלום, 🎉👩‍💻 — “quotes” … \u00a0\u2028end",
    "  leading, trailing  \n\n\n    indented\n",
)
_MARKUP = re.compile(r"<\|[a-z_0-9]+\|>")


def tokenizer_round_trip(tokenizer: Tokenizer) -> str | None:
    """Text that does not survive encoding and decoding."""
    for text in _ROUND_TRIP:
        ids = tokenizer.encode(text)
        back = tokenizer.decode(ids, start=True)
        if unicodedata.normalize("NFC", back) != unicodedata.normalize("NFC", text):
            return f"{text[:40]!r} comes back as {back[:40]!r}"
        if tokenizer.encode(back) != ids:
            return f"{text[:40]!r} has other ids the second time"
    return None


def tokenizer_size(tokenizer: Tokenizer, spec: ArchSpec) -> str | None:
    """Tokens without a row, or far more rows than padding explains."""
    tokens, rows = tokenizer.vocab_size, spec.vocab_size
    if tokens > rows:
        return f"{tokens:,} tokens for {rows:,} rows of the embedding"
    if rows - tokens > max(SPARE_ROWS, SPARE_SHARE * rows):
        return f"{rows:,} rows of the embedding for {tokens:,} tokens"
    return None


def tokenizer_order(tokenizer: Tokenizer) -> str | None:
    """Ids that do not follow the ranks of the merges that make their tokens.

    Byte-level BPE numbers its tokens as it learns them (GPT-2, Qwen, Llama 3). A vocabulary in
    another order does not fit the weights, though all text survives encoding and decoding.
    """
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    merged = [ids.get(merge.replace(" ", "")) for merge in tokenizer.merges]
    known = np.asarray([i for i in merged if i is not None])
    if len(known) < 2:
        return None
    wrong = len(merged) - len(known) + int(np.sum(np.diff(known) < 0))
    if wrong <= UNORDERED * len(merged):
        return None
    return (
        f"{wrong:,} of {len(merged):,} merges make a token of no id or of a lower one than before"
    )


def special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> str | None:
    """BOS or EOS that is not a token, or a chat template whose markup is split into pieces."""
    ids = {"EOS": tokenizer.eos_id}
    for name in ("bos", "eos"):
        for key in (f"tokenizer.ggml.{name}_token_id", f"{name}_token_id"):
            if isinstance(value := metadata.get(key), int | np.integer):
                ids[key] = int(value)
    for name, value in ids.items():
        if not 0 <= value < tokenizer.vocab_size:
            return f"{name} is {value}, the tokenizer has {tokenizer.vocab_size:,} tokens"
    eos = tokenizer.eos_id
    if eos not in tokenizer.special_ids:
        return f"EOS, id {eos}, is the ordinary token {tokenizer.tokens[eos]!r}"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
        for markup in dict.fromkeys(_MARKUP.findall(tokenizer.render(turns))):
            if len(tokenizer.encode(markup)) != 1:
                return f"the chat template writes {markup}, which is no token"
    return None


def loop_share(ids: Sequence[int]) -> float:
    """The part of the ids, from the end, that only repeats a piece of up to 32 ids."""
    best, n = 0, len(ids)
    for period in range(1, min(LOOP_PERIOD, n // 3) + 1):
        run = 0
        while run + period < n and ids[n - 1 - run] == ids[n - 1 - run - period]:
            run += 1
        if run >= 2 * period:  # at least three repetitions
            best = max(best, run + period)
    return best / n if n else 0.0


def repetition(outputs: Sequence[Completion]) -> str | None:
    """Most answers run to their limit in a loop. One may: weak models do, at temperature 0."""
    long = [o for o in outputs if len(o.ids) >= LOOP_IDS and o.reason == "length"]
    looping = [o for o in long if loop_share(o.ids) > LOOP_SHARE]
    if len(looping) < 2 or 2 * len(looping) <= len(outputs):
        return None
    example = f"...{looping[0].text[-60:]!r}"
    return f"{len(looping)} of {len(outputs)} answers end in a loop, such as {example}"


def silence(outputs: Sequence[Completion]) -> str | None:
    """All answers lack visible characters."""
    if not outputs or any(output.text.strip() for output in outputs):
        return None
    return f"all {len(outputs)} answers are empty"
