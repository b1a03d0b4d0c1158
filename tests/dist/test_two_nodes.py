"""Two network namespaces joined by one slow link are two machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RATE_MBIT = 400
PORT = 29611


@dataclass(frozen=True)
class Node:
    """A namespace with its end of the link."""

    namespace: str
    link: str
    address: str

    def start(self, arguments: list[str], directory: Path) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "GLOO_SOCKET_IFNAME": self.link, "TP_SOCKET_IFNAME": self.link, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, *arguments],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Both machines; what goes out of each is limited to ``RATE_MBIT``."""
    tag = f"i{os.getpid() % 100000}"
    pair = [Node(f"{tag}{side}", f"{tag}v{side}", f"10.231.77.{side + 1}") for side in (0, 1)]
    try:
        for node in pair:
            call("ip", "netns", "add", node.namespace)
        call("ip", "link", "add", pair[0].link, "type", "veth", "peer", "name", pair[1].link)
        for node in pair:
            inside = ("ip", "-n", node.namespace)
            call("ip", "link", "set", node.link, "netns", node.namespace)
            call(*inside, "addr", "add", f"{node.address}/24", "dev", node.link)
            call(*inside, "link", "set", "lo", "up")
            call(*inside, "link", "set", node.link, "up")
            shape = ("root", "tbf", "rate", f"{RATE_MBIT}mbit", "burst", "256kb", "latency", "50ms")
            call("tc", "-n", node.namespace, "qdisc", "add", "dev", node.link, *shape)
        yield pair
    finally:
        for node in pair:
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)


def on_both(nodes: list[Node], directory: Path, processes: int, *program: str) -> list[str]:
    """What each node printed; rendezvous is over the link."""
    running = []
    for rank, node in enumerate(nodes):
        launcher = [
            "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank), "--nproc_per_node",
            str(processes), "--master_addr", nodes[0].address, "--master_port", str(PORT),
        ]  # fmt: skip
        running.append(node.start([*launcher, *program], directory))
    said = [one.communicate(timeout=100)[0] for one in running]
    assert [one.returncode for one in running] == [0, 0], "\n".join(said)
    return said


MEASURE = """
import json, os, sys
import torch
torch.set_num_threads(1)
from bench.ranks import config_of
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig

def sent():
    with open(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes") as file:
        return int(file.read())

tokens = torch.arange(256).view(1, 256).roll(int(os.environ["RANK"]), 1)
found = {}
for stage in (2, 3):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=256, n_layers=8, n_heads=4, d_ff=704))
    config = config_of(stage, "none", "bf16", ".")
    config["infinity"] = {"slabs": 2}
    engine = initialize(model, config)[0]
    ledger = engine._parts.ledger
    for step in range(5):
        if step == 2:
            engine.settle()
            engine.averaged(0.0)
            before, waited, busy = sent(), sum(ledger.stalls.values()), ledger.busy["gather_sent"] + ledger.busy["reduce_sent"]
            spent = ledger.seconds["step"]
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
    engine.settle()
    engine.averaged(0.0)
    found[stage] = {
        "bytes": (sent() - before) / 3,
        "busy": ledger.busy["gather_sent"] + ledger.busy["reduce_sent"] - busy,
        "waited": sum(ledger.stalls.values()) - waited + ledger.seconds["step"] - spent,
        "parameters": engine._parts.partition.parameters,
        "loss": float(loss.detach()),
    }
    engine.destroy()
print("found " + json.dumps(found))
"""


@pytest.mark.slow
def test_stage_3_sends_half_as_much_again_behind_compute(nodes: list[Node], tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(MEASURE)
    for out in on_both(nodes, tmp_path, 1, "measure.py"):
        line = next(line for line in out.splitlines() if line.startswith("found "))
        found: dict[str, dict[str, Any]] = json.loads(line.removeprefix("found "))
        # Each of two ranks sends half of what a collective moves, 2 bytes an element; TCP, ACKs, talk come on top.
        unit = found["2"]["parameters"]
        assert 2 * unit < found["2"]["bytes"] < 2.2 * unit, found
        assert 1.25 < found["3"]["bytes"] / found["2"]["bytes"] < 1.55, found
        assert found["3"]["waited"] < found["3"]["busy"], found
        assert found["2"]["loss"] == found["3"]["loss"]


@pytest.mark.slow
def test_the_command_trains_on_two_nodes_of_two_ranks(nodes: list[Node], tmp_path: Path) -> None:
    options = ["infinity.nvme_path=" + str(tmp_path / "swap"), "run.output_dir=" + str(tmp_path / "out"), "run.steps=2"]
    sets = [part for option in options for part in ("--set", option)]
    first, second = on_both(nodes, tmp_path, 2, "-m", "infinity", "train", str(ROOT / "configs" / "tiny.json"), *sets)
    assert "step" in first
    assert "loss" not in second
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["world_size"] == 4
