"""Times training steps of one decoder beside plain PyTorch, FSDP2, DeepSpeed.

    python -m bench.step [--groups memory,nvme,...] [--dtypes bf16,fp32] [--shape 185m] [--swap DIR] [--rounds 7]

Every contestant lives in a process of its own and trains the same model from the same seed on the same data. Within a
group they take turns, a few consecutive steps each, in another order every round, because machines drift. A time is
the interval between the ends of consecutive steps, as in a long run, so an update that overlaps the next forward counts
as the user sees it; "settled" divides the time until the last update is over by the steps. A round during which other
processes kept the processors busy is tried again, a few times; what they took in the end is in the table. A ratio is
the median over the rounds of the ratio within the round.
In bf16 plain PyTorch has fp32 masters, as ours and DeepSpeed's have; "plain pure" has none.

Groups: ``memory`` (states in memory), ``peers`` (FSDP2, DeepSpeed in memory), ``nvme`` (states on NVMe, with what the
disk gives to fio between the rounds), ``long`` (all states on NVMe, 2048 tokens, with plain PyTorch beside which fio
moves as many bytes), ``layers`` (eight micro-batches, layer by layer), ``ram`` (peak memory against depth), ``large``
(1.3 B parameters on NVMe). Ours keeps activations (recompute off) wherever the table does not say otherwise, because
plain PyTorch keeps them. A contestant that is missing is named, then left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arguments import end_on_sigterm, one_of, positive, several
from bench.io_contestants import Unavailable as NoFio
from bench.step_contestants import Contestant, Field, Spec, Task, Unavailable
from bench.step_floor import MixedDisk, largest_cost, link_bytes
from bench.step_model import SHAPES, Shape
from bench.step_results import Group, Ratio, Round

DTYPES = ("bf16", "fp32")
GROUPS = ("memory", "peers", "nvme", "long", "layers", "ram", "large")
ALL_ON_NVME = dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "nvme")
FIO_BYTES = 1 << 30
QUIET = 0.2
"""Processors that others may keep busy during a round before it is tried again."""


def ours(placement: str, swap: str, name: str | None = None, **options: Any) -> Spec:
    """Our engine; ``placement`` is none, host, nvme (gradients in host memory) or all-nvme."""
    where = {"host": "cpu", "all-nvme": "nvme"}.get(placement, placement)
    override = {"placement": ALL_ON_NVME} if placement == "all-nvme" else {}
    override |= options.pop("override", {})
    return Spec(name or f"ours/{placement}", "ours", {"placement": where, "swap": swap, "override": override} | options)


def in_backward(placement: str, swap: str, name: str | None = None, **options: Any) -> Spec:
    """Ours with each unit updated as soon as backward has its gradient; nothing is clipped in these tasks."""
    override = {"update_in_backward": True}
    return ours(placement, swap, name or f"ours/{placement} in backward", override=override, **options)


def deepspeed(placement: str, swap: str) -> Spec:
    return Spec(f"deepspeed/{placement}", "deepspeed", {"placement": placement, "swap": swap})


PLAIN = Spec("plain", "plain")
PURE = Spec("plain pure", "plain", {"pure": True})
BYTES_PER_PARAMETER = 30
"""That a step moves with all states on NVMe in bf16: 16 read, 14 written."""


def one_round(contestant: Contestant, steps: int) -> Round:
    """Consecutive steps, with the processors that somebody else's processes kept busy meanwhile."""
    busy, start = busy_seconds(), time.perf_counter()
    answer = contestant.ask("steps", count=steps)
    foreign = (busy_seconds() - busy - answer["cpu_seconds"]) / (time.perf_counter() - start)
    settled, cpu = answer["seconds"] / steps, answer["cpu_seconds"] / steps
    return Round(answer["interval"], cpu, tuple(answer["losses"]), max(0.0, foreign), answer["split"], settled)


def quiet_round(contestant: Contestant, steps: int, tries: int) -> tuple[Round, list[float]]:
    """The round least disturbed by others, out of a few if need be, with the losses of all."""
    tried: list[Round] = []
    while not tried or (len(tried) < tries and tried[-1].foreign > QUIET):
        tried.append(one_round(contestant, steps))
    return min(tried, key=lambda each: each.foreign), [loss for each in tried for loss in each.losses]


def busy_seconds() -> float:
    """Processor time that all processes together have used; time stolen by the hypervisor counts."""
    with open("/proc/stat", encoding="ascii") as counters:
        user, nice, system, _, _, irq, softirq, steal = map(int, counters.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def compete(
    title: str,
    task: Task,
    specs: Sequence[Spec],
    rounds: int,
    steps: int,
    between: Callable[[], object] | None = None,
    tries: int = 1,
) -> Group:
    """Lets the contestants take turns after one round that does not count."""
    group = Group(title, task)
    with Field() as field:
        for spec in specs:
            field.enter(spec, task)
        group.missing = field.missing
        for turn in range(rounds + 1):
            order = list(field.running.items())
            first = turn % max(1, len(order))
            order = order[first:] + order[:first]
            for name, contestant in order if turn % 2 == 0 else reversed(order):
                try:
                    taken, losses = quiet_round(contestant, steps, tries)
                except Unavailable as why:
                    group.missing[name] = str(why)
                    field.running.pop(name)
                    continue
                group.losses.setdefault(name, []).extend(losses)
                if turn:
                    group.rounds.setdefault(name, []).append(taken)
            if turn == 0:
                before = {name: contestant.ask("facts") for name, contestant in field.running.items()}
            elif between is not None:
                between()
        group.rounds = {spec.name: group.rounds[spec.name] for spec in specs if spec.name in field.running}
        for name, contestant in field.running.items():
            group.facts[name] = since(before[name], contestant.ask("facts"))
            parameters = group.facts[name].get("report", {}).get("parameters")
            if parameters and "adam alone, s" not in group.floor:
                group.floor["adam alone, s"] = contestant.ask("adam", numel=parameters, dtype=task.dtype)["seconds"]
    return group


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Counters without what the warm-up counted; peaks and reports as they are."""
    found = dict(now)
    for key in ("steps", "read_bytes", "write_bytes"):
        found[key] = now[key] - before[key]
    for key in ("seconds", "stalls"):
        if key in now:
            found[key] = {name: value - before[key].get(name, 0.0) for name, value in now[key].items()}
    if "links" in now:
        found["links"] = {
            link: {unit: value - before["links"][link][unit] for unit, value in counts.items()}
            for link, counts in now["links"].items()
        }
    return found


def on_nvme(title: str, task: Task, specs: Sequence[Spec], rounds: int, steps: int, swap: str, tries: int = 1) -> Group:
    """A group with fio between its rounds, so that the floor is that of the same minutes."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(MixedDisk(swap, fio_bytes(task.shape)))
        except NoFio as why:
            group = compete(title, task, specs, rounds, steps, tries=tries)
            group.missing["fio"] = str(why)
            return group
        group = compete(title, task, specs, rounds, steps, disk.sample, tries)
        if disk.rates:
            group.floor["fio mixed GB/s"] = statistics.median(disk.rates)
    return group


def fio_bytes(shape: Shape) -> int:
    """The size of each file that fio moves; the small ones are for tests."""
    return FIO_BYTES if shape.d_model > 64 else 1 << 20


def add_floor(group: Group, name: str) -> Ratio | None:
    """Our step over the largest single cost; its parts go into the group's floor."""
    if name not in group.rounds or "fio mixed GB/s" not in group.floor or "plain" not in group.rounds:
        return None
    split = group.split("plain")
    compute = split["forward"] + split["backward"]
    if "recompute" in name:
        compute += split["forward"]
    nbytes, rate = link_bytes(group.facts[name]), group.floor["fio mixed GB/s"]
    floor, largest = largest_cost(compute, group.floor["adam alone, s"], nbytes, rate)
    group.floor |= {
        "compute (plain forward, backward), s": compute,
        f"{name} GB per step": nbytes / 1e9,
        f"{name} bytes at fio's rate, s": nbytes / rate / 1e9,
        f"{name} floor ({largest}), s": floor,
    }
    return Ratio.of(group.times(name), [floor] * len(group.times(name)))


def memory_table(groups: Sequence[Group]) -> str:
    """Peak memory over the import of torch, by depth."""
    names = list(dict.fromkeys(name for group in groups for name in group.rounds))
    lines = ["### Peak RSS over the import of torch, MiB", ""]
    lines.append("| layers | " + " | ".join(names) + " |")
    lines.append("|---" * (len(names) + 1) + "|")
    for group in groups:
        cells = [f"{peak_of(group, name) / 2**20:.0f}" if name in group.facts else "" for name in names]
        lines.append(f"| {group.task.shape.n_layers} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peak_of(group: Group, name: str) -> int:
    facts = group.facts[name]
    peak: int = facts["peak_rss"] - facts["import_rss"]
    return peak


class Bench:
    """The groups that were asked for, with the ratios that come out of them."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.shape: Shape = SHAPES[chosen.shape]
        self.swap = os.path.abspath(chosen.swap)
        self.rounds: int = chosen.rounds
        self.tries: int = chosen.tries
        self.tokens: int = chosen.tokens
        self.long_tokens: int = chosen.long_tokens
        self.threads: int = chosen.threads
        self.groups: list[Group] = []
        self.ratios: dict[str, float] = {}
        self.spreads: dict[str, str] = {}
        self.notes: list[str] = []
        self.profile: Path | None = chosen.profile

    def compete(self, title: str, task: Task, specs: Sequence[Spec], rounds: int, steps: int) -> Group:
        return compete(title, task, self.traced(title, task, specs), rounds, steps, tries=self.tries)

    def on_nvme(self, title: str, task: Task, specs: Sequence[Spec], rounds: int, steps: int) -> Group:
        return on_nvme(title, task, self.traced(title, task, specs), rounds, steps, self.swap, self.tries)

    def traced(self, title: str, task: Task, specs: Sequence[Spec]) -> list[Spec]:
        """The same contestants; ours write what they did into the folder for traces, if there is one."""
        if self.profile is None:
            return list(specs)
        self.profile.mkdir(parents=True, exist_ok=True)
        return [
            replace(
                spec, options=spec.options | {"profile": str((self.profile / trace_name(title, task, spec)).resolve())}
            )
            if spec.trainer == "ours"
            else spec
            for spec in specs
        ]

    def task(self, dtype: str, **changes: Any) -> Task:
        return replace(Task(self.shape, dtype, self.tokens, self.threads), **changes)

    def note(self, key: str, ratio: Ratio | None) -> None:
        if ratio is not None:
            self.ratios[key], self.spreads[key] = ratio.median, str(ratio)

    def memory(self, dtype: str) -> None:
        specs = [PLAIN, ours("none", self.swap), ours("host", self.swap), in_backward("host", self.swap)]
        group = self.compete("In memory", self.task(dtype), specs, self.rounds, 4)
        suffix = "" if dtype == "bf16" else f"_{dtype}"
        self.note(f"none_over_plain{suffix}", group.ratio("ours/none", "plain"))
        self.note(f"host_over_plain{suffix}", group.ratio("ours/host", "plain"))
        self.note(f"host_in_backward_over_plain{suffix}", group.ratio("ours/host in backward", "plain"))
        self.groups.append(group)

    def peers(self, dtype: str) -> None:
        # Two groups, because all at once need more memory than a small machine has.
        mine, suffix = ours("host", self.swap), "" if dtype == "bf16" else f"_{dtype}"
        torchs = [PLAIN, mine, Spec("fsdp2", "fsdp2")] + ([PURE] if dtype != "fp32" else [])
        theirs = [mine, deepspeed("none", self.swap), deepspeed("cpu", self.swap)]
        for title, specs in (("PyTorch in memory", torchs), ("DeepSpeed in memory", theirs)):
            group = self.compete(title, self.task(dtype), specs, self.rounds, 4)
            for spec in specs:
                if spec not in (PLAIN, mine):
                    other = spec.name.replace("/", "_").replace(" ", "_")
                    self.note(f"host_over_{other}{suffix}", group.ratio(mine.name, spec.name))
            self.groups.append(group)

    def nvme(self, dtype: str) -> None:
        mine, frugal = in_backward("nvme", self.swap), in_backward("all-nvme", self.swap)
        specs = [PLAIN, ours("nvme", self.swap), mine, frugal, deepspeed("nvme", self.swap)]
        group = self.on_nvme("On NVMe", self.task(dtype), specs, self.rounds, 4)
        suffix = "" if dtype == "bf16" else f"_{dtype}"
        self.note(f"nvme_over_floor{suffix}", add_floor(group, mine.name))
        self.note(f"all_nvme_over_floor{suffix}", add_floor(group, frugal.name))
        self.note(f"nvme_at_step_over_floor{suffix}", add_floor(group, "ours/nvme"))
        self.note(f"nvme_over_plain{suffix}", group.ratio(mine.name, "plain"))
        self.note(f"nvme_over_deepspeed{suffix}", group.ratio(mine.name, "deepspeed/nvme"))
        self.note(f"nvme_at_step_over_deepspeed{suffix}", group.ratio("ours/nvme", "deepspeed/nvme"))
        self.groups.append(group)

    def long(self, dtype: str) -> None:
        if dtype != "bf16":
            return
        frugal, roomy = in_backward("all-nvme", self.swap), in_backward("nvme", self.swap)
        moved = {"swap": self.swap, "nbytes": BYTES_PER_PARAMETER * self.shape.parameters}
        beside = Spec("plain beside fio", "plain", moved | {"file_bytes": fio_bytes(self.shape)})
        specs = [PLAIN, beside, ours("all-nvme", self.swap), frugal, roomy]
        task = self.task(dtype, tokens=self.long_tokens)
        group = self.on_nvme("Long sequence on NVMe", task, specs, self.rounds, 3)
        add_floor(group, frugal.name)
        self.note("nvme_2048_over_plain", group.ratio(frugal.name, "plain"))
        self.note("nvme_2048_grads_in_host_over_plain", group.ratio(roomy.name, "plain"))
        self.note("nvme_2048_over_plain_beside_fio", group.ratio(frugal.name, beside.name))
        self.note("plain_2048_beside_fio_over_plain", group.ratio(beside.name, "plain"))
        self.note("nvme_2048_at_step_over_plain", group.ratio("ours/all-nvme", "plain"))
        self.groups.append(group)

    def layers(self, dtype: str) -> None:
        if dtype != "bf16":
            return
        single = self.compete("One micro-batch", self.task(dtype), [ours("all-nvme", self.swap)], 1, 2)
        specs = [
            ours("all-nvme", self.swap, "ours/all-nvme"),
            ours("all-nvme", self.swap, "ours/all-nvme layer-major", layer_major=True),
        ]
        eight = self.compete("Eight micro-batches", self.task(dtype, micro_batches=8), specs, self.rounds, 2)
        ordinary, layered = (spec.name for spec in specs)
        self.note("layer_major_over_ordinary", eight.ratio(layered, ordinary))
        self.groups += [single, eight]
        if layered in eight.rounds and ordinary in eight.rounds and "ours/all-nvme" in single.rounds:
            same = agree(eight, layered, ordinary)
            counts = [last_read(single, "ours/all-nvme"), last_read(eight, layered), last_read(eight, ordinary)]
            self.notes.append(
                f"Layer-major: bytes read per step with 1 micro-batch {counts[0]}, with 8 {counts[1]}, with 8 in the "
                f"ordinary order {counts[2]}; losses of both orders {'equal' if same else 'DIFFER'} bit for bit"
            )
            self.ratios["layer_major_read_over_single"] = counts[1] / counts[0]

    def ram(self, dtype: str) -> None:
        if dtype != "bf16":
            return
        specs = [
            PLAIN,
            ours("host", self.swap),
            in_backward("host", self.swap),
            in_backward("all-nvme", self.swap),
            in_backward("all-nvme", self.swap, "ours/all-nvme in backward, recompute", recompute=True),
        ]
        depths = [self.shape.n_layers // 2, self.shape.n_layers, 2 * self.shape.n_layers]
        groups = []
        for depth in depths:
            task = self.task(dtype, shape=self.shape.deeper(depth))
            # One at a time: peaks need no company, and memory for two of the deepest may not be there.
            parts = [self.compete("Peak memory", task, [spec], 1, 2) for spec in specs]
            group = Group("Peak memory", task)
            for part in parts:
                group.rounds |= part.rounds
                group.losses |= part.losses
                group.facts |= part.facts
                group.missing |= part.missing
            groups.append(group)
        self.notes.append(memory_table(groups))
        middle = groups[1]
        if "plain" in middle.facts:
            keys = ("host", "host_in_backward", "nvme", "nvme_recompute")
            for name, key in zip((spec.name for spec in specs[1:]), keys, strict=True):
                if name in middle.facts:
                    self.ratios[f"ram_{key}_over_plain"] = peak_of(middle, name) / peak_of(middle, "plain")
        flat = specs[4].name
        if all(flat in group.facts for group in groups):
            self.ratios["ram_nvme_growth"] = peak_of(groups[2], flat) / peak_of(groups[0], flat)

    def large(self, dtype: str) -> None:
        if dtype != "bf16":
            return
        specs = [ours("all-nvme", self.swap), in_backward("all-nvme", self.swap), in_backward("nvme", self.swap)]
        task = self.task(dtype, shape=SHAPES["1.3b"] if self.shape.d_model > 64 else self.shape)
        groups = [self.on_nvme("1.3 B on NVMe", task, [spec], 2, 2) for spec in specs]
        self.groups += groups

    def json(self) -> dict[str, Any]:
        return {
            "ratios": self.ratios,
            "spreads": self.spreads,
            "load_average": os.getloadavg(),
            "processors": os.cpu_count(),
        }


def agree(group: Group, name: str, other: str) -> bool:
    """Whether the losses are equal bit for bit, as far as both have got."""
    return all(a == b for a, b in zip(group.losses[name], group.losses[other], strict=False))


def trace_name(title: str, task: Task, spec: Spec) -> str:
    words = f"{title} {task.dtype} {task.shape.n_layers} layers {spec.name}"
    return "-".join(words.lower().replace("/", " ").split()) + ".json"


def last_read(group: Group, name: str) -> int:
    """NVMe bytes that the last step but one read, by our own count."""
    read: int = group.facts[name]["report"]["nvme_last_step"]["read"]
    return read


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=several(one_of(GROUPS)), default=",".join(GROUPS), help="comma-separated")
    parser.add_argument("--dtypes", type=several(one_of(DTYPES)), default="bf16,fp32", help="comma-separated")
    parser.add_argument("--shape", default="185m", choices=SHAPES)
    parser.add_argument("--swap", default="runs/bench-step", help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=positive, default=7, help="turns of each contestant; take 7 or more")
    parser.add_argument("--tries", type=positive, default=3, help="tries of a round that others disturb")
    parser.add_argument("--tokens", type=positive, default=256)
    parser.add_argument("--long-tokens", type=positive, default=2048)
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--profile", type=Path, help="a folder for one Chrome trace per group and contestant of ours")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object per group, the ratios last")
    chosen = parser.parse_args()
    end_on_sigterm()
    os.makedirs(chosen.swap, exist_ok=True)
    bench = Bench(chosen)
    written: list[str] = []

    def tell(text: str) -> None:
        written.append(text)
        print(text, file=sys.stderr if chosen.json else sys.stdout, flush=True)
        if chosen.markdown is not None:
            chosen.markdown.write_text("\n\n".join(written) + "\n", encoding="utf-8")

    for dtype in chosen.dtypes:
        for name in chosen.groups:
            groups, notes = len(bench.groups), len(bench.notes)
            load = os.getloadavg()[0]
            getattr(bench, name)(dtype)
            for group in bench.groups[groups:]:
                tell(f"{group.table()}\n\n(load average before: {load:.1f})")
                if chosen.json:
                    print(json.dumps(group.as_json()), flush=True)
            for text in bench.notes[notes:]:
                tell(text)
    if chosen.rounds < 7:
        tell("Fewer than 7 rounds: take these ratios for a try.")
    for key, spread in bench.spreads.items():
        tell(f"{key}: {spread}")
    print(json.dumps(bench.json()))


if __name__ == "__main__":
    main()
