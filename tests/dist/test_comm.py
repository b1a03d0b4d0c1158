"""What ranks exchange arrives; ranks that ask for different things find out."""

from __future__ import annotations

from datetime import timedelta

import pytest

from infinity.comm.transport import await_store
from infinity.errors import ConfigError, RankError
from tests.dist.helpers import Launcher, blamed, free_port

OPEN = """
import threading
import torch
from infinity.comm import open_group
from infinity.device.lane import DONE
from infinity.obs.ledger import Ledger

ledger = Ledger()
group = open_group({timeout}, ledger)
assert (group.rank, group.world_size) == (RANK, RANKS)
UNITS, SLICE = 4, 8192
own = {{unit: torch.full((SLICE,), 10 * unit + RANK, dtype=torch.uint8) for unit in range(UNITS)}}
sums = {{}}
def sink(unit, rank, flags, chunk):
    sums.setdefault(unit, []).append((flags[0], chunk.clone()))
group.serve(own.__getitem__, sink, torch.empty(RANKS * SLICE, dtype=torch.uint8))
def slab(unit):
    flat = torch.zeros(RANKS * SLICE, dtype=torch.uint8)
    flat[RANK * SLICE : (RANK + 1) * SLICE] = own[unit]
    return flat
def gathered(unit):
    return torch.cat([torch.full((SLICE,), 10 * unit + rank, dtype=torch.uint8) for rank in range(RANKS)])
"""


def code(body: str, timeout: float = 20.0) -> str:
    return OPEN.format(timeout=timeout) + body + "\ngroup.close()\nprint('good')\n"


EXCHANGES = """
for _ in range(3):
    slabs = [slab(unit) for unit in range(UNITS)]
    tickets = [group.gather(unit, f"blocks.{unit}", flat, DONE) for unit, flat in enumerate(slabs)]
    for unit, ticket in enumerate(tickets):
        ticket.wait()
        assert torch.equal(slabs[unit], gathered(unit))
assert ledger.bytes["gather_sent"] == ledger.bytes["gather_received"] == 3 * UNITS * SLICE * (RANKS - 1)

flat = torch.arange(RANKS * SLICE, dtype=torch.int64).remainder(7).add(RANK).to(torch.uint8)
group.reduce(2, "blocks.2", [bytes([RANK])], [flat]).wait()
mine = torch.arange(RANK * SLICE, (RANK + 1) * SLICE).remainder(7)
assert [flag for flag, _ in sums[2]] == list(range(RANKS))
for rank, (_, chunk) in enumerate(sums[2]):
    assert torch.equal(chunk, mine.add(rank).to(torch.uint8))
assert ledger.bytes["reduce_sent"] == SLICE * (RANKS - 1)

words = [b"x" * (rank * 300) for rank in range(RANKS)]
assert group.talk("words", words[RANK]) == words
value = torch.full((3, 5), float(RANK))
group.broadcast("value", value, 1)
assert torch.equal(value, torch.ones(3, 5))
whole = torch.full((10,), -1.0)
whole[RANK : RANK + 1] = RANK
group.pieces("pieces", [whole[rank : rank + 1] for rank in range(RANKS)])
assert torch.equal(whole[:RANKS], torch.arange(RANKS).float())
assert torch.equal(whole[RANKS:], torch.full((10 - RANKS,), -1.0))
assert len(set(group.talk("trace", group.trace()))) == 1
"""

JOINED = """
kept = slab(1)
for unit in (0, 1, 2, 3):
    if unit == 1 and RANK == 1:
        continue
    flat = slab(unit)
    group.gather(unit, f"blocks.{unit}", flat, DONE).wait()
    assert torch.equal(flat, gathered(unit))
for unit in (3, 2, 1, 0):
    if unit == 1 and RANK == 1:
        continue
    group.reduce(unit, f"blocks.{unit}", [bytes([RANK])], [slab(unit)])
group.barrier("step")
assert [flag for flag, _ in sums[1]] == [rank for rank in range(RANKS) if rank != 1]
assert [flag for flag, _ in sums[0]] == list(range(RANKS))
said = group.talk("trace", group.trace())
assert [rank for rank in range(RANKS) if said[rank] != said[0]] == [1]
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_arrive_also_with_ranks_that_leave_a_unit_out(ranks: int, launcher: Launcher) -> None:
    launcher.succeed(ranks, code(EXCHANGES + "\nsums.clear()\n" + JOINED))


def test_different_talks_end_every_rank(launcher: Launcher) -> None:
    finished = launcher.run(3, code("group.barrier('save' if RANK == 2 else 'step')"))
    blamed(finished, 2)
    assert all("rank 2 is at save, step 0" in one.err for one in finished)


def test_a_rank_that_is_gone_is_named(launcher: Launcher) -> None:
    finished = launcher.run(3, code("if RANK == 1: os._exit(7)\ngroup.barrier('step')"))
    blamed(finished, 1)
    assert finished[1].code == 7


def test_a_rank_that_leaves_early_is_named(launcher: Launcher) -> None:
    body = "if RANK == 1:\n    group.close(); threading.Event().wait(1.5); sys.exit(1)\ngroup.barrier('next')"
    finished = launcher.run(2, code(body))
    blamed(finished, 1)
    assert "engine.padded(loader)" in finished[0].err


def test_a_rank_that_raises_gives_the_others_its_reason(launcher: Launcher) -> None:
    finished = launcher.run(3, code("if RANK == 1: raise KeyError('bad batch')\ngroup.barrier('step')"))
    blamed(finished, 1)
    assert all("KeyError: 'bad batch'" in finished[rank].err for rank in (0, 2))


def test_a_rank_that_hangs_is_named_within_the_timeout(launcher: Launcher) -> None:
    body = "group.barrier('begin')\nif RANK == 1: threading.Event().wait(5); os._exit(1)\ngroup.barrier('step')"
    finished = launcher.run(2, code(body, timeout=1.5))
    blamed(finished, 1)
    assert "within infinity.timeout_seconds (1.5 s)" in finished[0].err


def test_nobody_listens_where_ranks_meet() -> None:
    port = free_port()
    with pytest.raises(RankError, match=f"rank 1 did not reach .* rank 0 .* at 127.0.0.1:{port} within 0.1 s") as lost:
        await_store(1, f"127.0.0.1:{port}", timedelta(seconds=0.1))
    assert lost.value.rank == 0
    with pytest.raises(ConfigError, match="MASTER_PORT is 'here'; expected a number"):
        await_store(1, "127.0.0.1:here", timedelta(seconds=0.1))
