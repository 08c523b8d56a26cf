"""What a student is trained to minimise: divergences as values, and the loss made of one.

`kd` and `divergences` are of logits, unreduced. `chunked` and `topk` sum them from hidden states.
"""

from kdjax.losses.chunked import EvalSums, HeadSpec, LossSums, head_evaluation, head_loss
from kdjax.losses.divergences import (
    Divergence,
    JensenShannon,
    SkewedForwardKL,
    SkewedReverseKL,
    as_divergence,
    forward_kl,
    jensen_shannon,
    parse_divergence,
    reverse_kl,
    total_variation,
)
from kdjax.losses.kd import KDLoss, cross_entropy, kd_logit_gradient, kd_loss

__all__ = [
    "Divergence",
    "EvalSums",
    "HeadSpec",
    "JensenShannon",
    "KDLoss",
    "LossSums",
    "SkewedForwardKL",
    "SkewedReverseKL",
    "as_divergence",
    "cross_entropy",
    "forward_kl",
    "head_evaluation",
    "head_loss",
    "jensen_shannon",
    "kd_logit_gradient",
    "kd_loss",
    "parse_divergence",
    "reverse_kl",
    "total_variation",
]
