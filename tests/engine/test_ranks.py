"""What a rank does by itself: its cores, its model under construction."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.materialize import ForgottenValues
from infinity.engine.placeholder import OffloadedParameter
from infinity.engine.ranks import share_of_cores


def test_ranks_of_a_machine_share_its_cores_in_blocks() -> None:
    cores = [0, 1, 2, 3, 8, 9, 10, 11, 12]
    shares = [share_of_cores(cores, rank, 4) for rank in range(4)]
    assert shares == [{0, 1}, {2, 3}, {8, 9}, {10, 11}]
    assert share_of_cores({4, 5}, 1, 2) == {4, 5}, "one core would have to compute, exchange and update at once"
    assert share_of_cores(cores, 0, 1) == set(cores)


def test_a_rank_that_is_not_the_first_forgets_what_leaves_the_window() -> None:
    values = ForgottenValues(window_bytes=4 * 1000)
    first, second = nn.Parameter(torch.ones(600)), nn.Parameter(torch.ones(20, 40))
    values.admit(first)
    values.admit(second)
    assert isinstance(first, OffloadedParameter)
    assert not isinstance(second, OffloadedParameter)
    assert torch.equal(values.read(first), torch.zeros(600))
    with torch.no_grad():
        first.add_(2)  # an initialiser goes on
    assert torch.equal(first.detach(), torch.full((600,), 2.0))
    assert isinstance(second, OffloadedParameter)
    values.forget(second)
