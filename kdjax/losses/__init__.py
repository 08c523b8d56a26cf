"""Losses that a student minimises: divergences as values, and the loss built from one.

`kd` and `divergences` take logits and reduce nothing. `chunked` and `topk` sum over hidden states.
"""

from kdjax.losses.kd import KDLoss, kd_logit_gradient, kd_loss

__all__ = ["KDLoss", "kd_logit_gradient", "kd_loss"]
