"""Losses that a student minimises: divergences as values, and the loss made of one.

`kd` and `divergences` are of logits, unreduced. `chunked` and `topk` sum them from hidden states.
"""

from kdjax.losses.kd import KDLoss, kd_logit_gradient, kd_loss

__all__ = ["KDLoss", "kd_logit_gradient", "kd_loss"]
