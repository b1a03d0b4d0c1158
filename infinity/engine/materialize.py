"""Builds a model piece by piece, so that the whole of it never exists at once."""

from __future__ import annotations

import torch
from torch import nn


def initial_value(parameter: nn.Parameter) -> torch.Tensor:
    """The value a parameter starts from."""
    return parameter.detach()
