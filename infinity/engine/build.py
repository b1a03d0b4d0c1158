"""The composition root: from a model with a config to a running engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity._native.cpu_adam import Kernels, open_kernels
from infinity.comm import Group, open_group
from infinity.config import Config
from infinity.device.cpu import CpuDevice
from infinity.device.lane import CallersLane, Lane
from infinity.engine.homes import Homes
from infinity.engine.planning import plan_for
from infinity.engine.ranks import check_alike, on_own_cores, ranked_updater, share_of_threads, shared_units, whole_sums
from infinity.errors import ConfigError
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.obs.ledger import Ledger
from infinity.optim.rules import AdamRule
from infinity.optim.updater import Updater
from infinity.plan import Plan, PlanLine
from infinity.plan.placement import STREAMED_KINDS
from infinity.plan.slabs import slab_classes
from infinity.shard.ownership import shard_of
from infinity.shard.partition import Partition, Unit
from infinity.storage.activation_file import ActivationFile
from infinity.storage.io_engine import Faults, IoEngine, open_io_engine
from infinity.storage.store import Extent, FileStore, MemoryStore, SplitStore, Store
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.swap_file import SwapFile
from infinity.storage.verified_activations import VerifiedActivationFile
from infinity.storage.verified_store import VerifiedFileStore
from infinity.storage.watchdog import Watchdog
from infinity.stream.activations import Activations, ActivationStream, DeviceActivations
from infinity.stream.consumed import ConsumedGradients, ConsumedGradStream
from infinity.stream.exchange import GradExchange
from infinity.stream.gathered import GatheredParams
from infinity.stream.grads import GradStream
from infinity.stream.params import ParamStream
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up

log = logging.getLogger("infinity")


@dataclass(frozen=True)
class Injected:
    """What tests and benches put between the parts: NaN in freed slabs, jitter in lanes, faults in I/O, another
    read-ahead, a ledger that keeps more."""

    poison: bool = False
    delay: Callable[[], None] | None = None
    faults: Faults | None = None
    read_ahead: int | None = None
    ledger: Ledger | None = None


@dataclass
class Parts:
    """Everything an engine owns, in the order in which it is built; closed in reverse.

    ``updated`` is what this rank updates of each unit, in stores[kind]: its slice, or all with one rank or stage 0.
    """

    config: Config
    group: Group
    device: CpuDevice
    partition: Partition
    plan: Plan
    ledger: Ledger
    kernels: Kernels
    arenas: dict[Tier, Arena]
    memories: list[HostMemory]
    homes: Homes
    updated: tuple[Unit, ...]
    stores: dict[StateKind, Store]
    swap: list[SwapDirectory] = field(default_factory=list)
    io: IoEngine | None = None
    lanes: list[Lane | CallersLane] = field(default_factory=list)
    watchdog: Watchdog | None = None
    activations: Activations = field(default_factory=DeviceActivations)
    params: ParamStream = None  # type: ignore[assignment]
    grads: GradStream | GradExchange = None  # type: ignore[assignment]
    updater: Updater = None  # type: ignore[assignment]

    @property
    def is_resident(self) -> bool:
        """Whether parameters never move, no update is ever behind, gradients are complete only with the backward."""
        placement = self.plan.placement
        whole = self.group.world_size == 1 and not self.partition.tiled and not placement.in_backward
        return whole and not placement.fetched(self.partition) and not _update_waits(self)

    def settle(self) -> None:
        """Waits until every update has been made and every write has reached its tier."""
        self.params.settle()
        self.grads.settle()
        self.activations.settle()
        for store in self.stores.values():
            store.settle()

    def close(self) -> None:
        """Ends threads, closes files, removes swap, gives memory back; what fails does not keep the rest from it."""
        if self.updater is not None:  # as it is when building fails
            self.updater.close()
        with ExitStack() as last_to_first:
            for memory in self.memories:
                last_to_first.callback(memory.free)
            for directory in self.swap:
                last_to_first.callback(directory.remove)
            if self.io is not None:
                last_to_first.callback(self.io.close)
            for lane in reversed(self.lanes):
                last_to_first.callback(lane.close)
            last_to_first.callback(self.group.close)
            if self.watchdog is not None:
                last_to_first.callback(self.watchdog.close)


def build_parts(
    model: nn.Module,
    config: Config,
    injected: Injected,
    *,
    moments: bool = True,
    micro_batch: Any = None,
    layer_major: bool = False,
) -> Parts:
    """Plans, allocates once, opens the swap files, wires the streams; nothing of ``model`` is moved yet."""
    ledger = injected.ledger or Ledger()
    group = open_group(config.infinity.timeout_seconds, ledger, injected.delay)
    try:
        batch = {"micro_batch": micro_batch, "layer_major": layer_major}
        return _build(model, config, injected, group, ledger, moments=moments, **batch)
    except BaseException:
        group.close()
        raise


def _build(
    model: nn.Module, config: Config, injected: Injected, group: Group, ledger: Ledger, *, moments: bool, **batch: Any
) -> Parts:
    found, plan = plan_for(
        model,
        config,
        world_size=group.world_size,
        read_ahead=injected.read_ahead,
        moments=moments,
        local_ranks=group.local_world_size,
        **batch,
    )
    check_alike(group, model, config, found, plan, moments=moments)
    _check_update_in_backward(config, group.world_size, moments=moments)
    threads = config.infinity.adam_threads
    kernels = open_kernels(config.infinity.isa, share_of_threads(group) if threads == "auto" else threads)
    device = CpuDevice()
    memories: list[HostMemory] = []
    arenas = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        nbytes = plan.arena_bytes(tier)
        memory = device.allocate(nbytes) if tier is Tier.DEVICE else HostMemory(nbytes)
        memories.append(memory)
        arenas[tier] = Arena(tier, memory.bytes)
    arenas[Tier.DEVICE].occupy(plan.total(Tier.DEVICE) - plan.arena_bytes(Tier.DEVICE))  # which torch allocates
    slices = tuple(shard_of(unit, group.rank) for unit in found.units)
    updated = found.units if StateKind.MASTER in plan.placement.whole else slices
    homes = Homes(group, plan.placement, found.units, slices)
    stores = homes.stores if updated is found.units else homes.slice_stores
    parts = Parts(config, group, device, found, plan, ledger, kernels, arenas, memories, homes, updated, stores)
    try:
        with on_own_cores(group):
            _open_stores(parts, injected)
            _wire(parts, injected)
        if parts.io is not None:
            parts.io.register([region for arena in arenas.values() for region in arena.regions])
        files = [store for store in homes.stores.values() if isinstance(store, FileStore)]
        parts.watchdog = Watchdog([*files, *parts.lanes], config.infinity.timeout_seconds)
        log.info("%s", plan.render())
    except BaseException:
        parts.close()
        raise
    return parts


def _check_update_in_backward(config: Config, world_size: int, *, moments: bool) -> None:
    """What the config alone does not tell: the optimizer that was passed, accumulation by the batch sizes."""
    if not config.infinity.update_in_backward:
        return
    if world_size > 1:
        raise ConfigError(
            f"`infinity.update_in_backward` is true, but there are {world_size} ranks, whose gradients are complete "
            "only when all have come to the end of backward; set it to false"
        )
    steps = config.resolve_batch(world_size).accumulation_steps
    if steps > 1:
        raise ConfigError(
            f"`infinity.update_in_backward` is true, but the batch sizes make {steps} gradient accumulation steps on "
            f"{world_size} ranks, so that no gradient is complete in one backward; set `infinity.update_in_backward` "
            "to false, or raise `train_micro_batch_size_per_gpu`"
        )
    if not moments:
        raise ConfigError(
            "`infinity.update_in_backward` is true, which the native Adam alone can do; pass torch.optim.Adam or "
            "AdamW, or set `infinity.update_in_backward` to false"
        )


def _open_stores(parts: Parts, injected: Injected) -> None:
    placement, partition = parts.plan.placement, parts.partition
    on_nvme = [kind for kind in STREAMED_KINDS if placement.total(kind, partition, Tier.NVME)]
    extents = _reserve_swap(parts, on_nvme)
    spilled = _activation_files(parts)
    if on_nvme or spilled:
        aio = parts.config.aio
        disks = {extent.file.device for units in extents.values() for extent in units.values()}
        disks |= {file.device for file in spilled}
        parts.io = open_io_engine(
            parts.config.infinity.io_engine,
            queue_depth=(32 if aio.queue_depth == "auto" else aio.queue_depth) * len(disks),
            block_size=1 << 20 if aio.block_size == "auto" else aio.block_size,
            threads=4 if aio.threads == "auto" else aio.threads,
            faults=injected.faults,
        )
    for kind in STREAMED_KINDS:
        regions = {
            unit.index: parts.arenas[tier].resident(placement.nbytes(kind, unit), kind.value)
            for unit in partition.units
            if placement.has(kind, unit) and (tier := placement.tier(kind, unit)) is not Tier.NVME
        }
        if kind not in on_nvme:
            parts.homes.stores[kind] = MemoryStore(placement[kind], regions)
            parts.homes.slice_stores[kind] = parts.homes.stores[kind]
            if kind in placement.whole:
                own = {index: region.chunk(placement.ranks)[parts.group.rank] for index, region in regions.items()}
                parts.homes.slice_stores[kind] = MemoryStore(placement[kind], own)
            if kind is StateKind.GRAD and placement.in_backward:
                parts.homes.slice_stores[kind] = ConsumedGradients()
            continue
        staging = parts.plan.staging.get(kind)
        pool = None if staging is None else _pool(parts, staging, injected)
        assert parts.io is not None
        kind_of_store = VerifiedFileStore if parts.config.infinity.verify else FileStore
        names = {
            unit.index: f'{kind.value} of unit "{unit.name}" ({str(placement.dtype(kind, unit)).split(".")[-1]}, '
            f"{placement.nbytes(kind, unit)} bytes)"
            for unit in partition.units
        }
        files = kind_of_store(parts.io, extents[kind], parts.ledger, pool, names)
        store: Store = files
        if regions:
            store = SplitStore(MemoryStore(Tier.HOST, regions), frozenset(regions), files)
        parts.homes.stores[kind] = parts.homes.slice_stores[kind] = store
    _open_activations(parts, spilled, injected)


def _activation_files(parts: Parts) -> list[SwapFile]:
    """An empty file on every disk that unit inputs may go to."""
    if _inputs_tier(parts) is not Tier.NVME:
        return []
    files = []
    for path in map(os.path.abspath, parts.config.swap_directories(StateKind.ACTIVATION)):
        owned = next((directory for directory in parts.swap if directory.root == path), None)
        if owned is None:
            owned = SwapDirectory(path, rank=parts.group.rank, nbytes=0)
            parts.swap.append(owned)
        files.append(owned.create(StateKind.ACTIVATION.value, 0))
    return files


def _open_activations(parts: Parts, files: list[SwapFile], injected: Injected) -> None:
    """Unit inputs may fill what the host budget leaves, in memory that is neither pinned nor touched before its use."""
    plan, arena, budget = parts.plan, parts.arenas[Tier.HOST], parts.plan.budgets[Tier.HOST]
    if _inputs_tier(parts) is Tier.DEVICE or budget is None:
        return
    region = HostMemory((budget - plan.arena_bytes(Tier.HOST)) // PAGE_BYTES * PAGE_BYTES)
    parts.memories.append(region)
    spill = None
    if files:
        assert parts.io is not None
        space = plan.budgets[Tier.NVME]
        left = None if space is None else space - plan.arena_bytes(Tier.NVME)
        kind_of_file = VerifiedActivationFile if parts.config.infinity.verify else ActivationFile
        spill = kind_of_file(parts.io, files, left, parts.ledger)
    window = None if plan.waiting is None else plan.waiting.window
    parts.activations = ActivationStream(arena, region.bytes, spill, parts.ledger, window, poison=injected.poison)


def _inputs_tier(parts: Parts) -> Tier:
    """Where the inputs of recomputed units go, as far as they leave the device."""
    waiting, asked = parts.plan.waiting, parts.config.tier_of(StateKind.ACTIVATION)
    return waiting.tier if waiting is not None else asked or Tier.DEVICE


def _reserve_swap(parts: Parts, kinds: Iterable[StateKind]) -> dict[StateKind, dict[int, Extent]]:
    """One file per kind in each directory, units dealt out in turn; every byte is reserved before one is written."""
    placement = parts.plan.placement
    dealt: dict[StateKind, dict[int, tuple[str, int, int]]] = {}
    sizes: dict[str, dict[StateKind, int]] = {}
    for kind in kinds:
        directories = parts.config.swap_directories(kind)
        dealt[kind] = {}
        members = [unit for unit in parts.partition.units if placement.has(kind, unit)]
        members = [unit for unit in members if placement.tier(kind, unit) is Tier.NVME]
        for turn, unit in enumerate(members):
            directory = os.path.abspath(directories[turn % len(directories)])
            used = sizes.setdefault(directory, {}).setdefault(kind, 0)
            nbytes = round_up(placement.nbytes(kind, unit), PAGE_BYTES)
            dealt[kind][unit.index] = (directory, used, nbytes)
            sizes[directory][kind] = used + nbytes
    files = {}
    for directory, by_kind in sizes.items():
        owned = SwapDirectory(directory, rank=parts.group.rank, nbytes=sum(by_kind.values()))
        parts.swap.append(owned)
        for kind, nbytes in by_kind.items():
            files[directory, kind] = owned.create(kind.value, nbytes)
    return {
        kind: {
            index: Extent(files[directory, kind], offset, nbytes)
            for index, (directory, offset, nbytes) in units.items()
        }
        for kind, units in dealt.items()
    }


def _update_waits(parts: Parts) -> bool:
    """Whether the update spends time on a link, which a thread of its own hides behind compute.

    If not, it needs the very processors that compute: a thread would hide nothing, and with a second OpenMP team in
    the process the workers of both sleep between parallel regions instead of spinning, which costs more than it saves.
    """
    placement = parts.plan.placement
    on_nvme = any(placement.total(kind, parts.partition, Tier.NVME) for kind in STREAMED_KINDS)
    return not parts.device.is_host or on_nvme


def _wire(parts: Parts, injected: Injected) -> None:
    plan, units, homes, group = parts.plan, parts.partition.units, parts.homes, parts.group
    trained = [unit for unit in units if unit.trainable]
    fetch = Lane("fetch", injected.delay)
    update = Lane("update", injected.delay) if _update_waits(parts) else CallersLane(injected.delay)
    parts.lanes = [update, fetch]
    pools = _pools(parts, Tier.DEVICE, plan.param_slabs, "parameter slabs", injected)
    fetched = plan.placement.fetched(parts.partition)
    sizes = _slab_bytes(fetched, [unit.layout.nbytes() for unit in fetched])
    prefetch = parts.config.infinity.prefetch_units
    look_ahead = None if prefetch == "auto" else prefetch
    arguments = (units, homes.stores[StateKind.PARAM], pools, sizes, fetch, parts.ledger, look_ahead)
    parts.params = GatheredParams(group, *arguments) if plan.placement.gathers else ParamStream(*arguments)
    pools = _pools(parts, Tier.HOST, plan.grad_slabs, "gradient slabs", injected)
    passing = plan.placement.summed_in_slabs(parts.partition)
    sizes = _slab_bytes(passing, [unit.layout.shard_nbytes(torch.float32) for unit in passing])
    stream = ConsumedGradStream if plan.placement.in_backward else GradStream
    grads = homes.slice_stores[StateKind.GRAD]
    parts.grads = stream(homes.slices, grads, pools, sizes, parts.kernels, parts.ledger)
    if group.world_size > 1:
        pools = _pools(parts, Tier.DEVICE, plan.collection_slabs, "gradients to send", injected)
        sizes = _slab_bytes(trained, [unit.layout.nbytes() for unit in trained]) if pools else {}
        parts.grads = GradExchange(
            units,
            parts.grads,
            homes.slices,
            group,
            pools,
            sizes,
            shared_units(parts.partition),
            whole_sums(homes),
            parts.kernels,
        )
        received = parts.arenas[Tier.DEVICE].resident(plan.received_bytes, "gradients received")
        shard = parts.params.slice_of if isinstance(parts.params, GatheredParams) else None
        group.serve(shard, parts.grads.receive, received)
    rule = AdamRule(parts.kernels)
    rest = (plan.placement, parts.stores, rule, plan.subgroup_numel, plan.read_ahead, update, parts.ledger)
    parts.updater = Updater(*rest) if group.world_size == 1 else ranked_updater(homes, *rest)


def _pool(parts: Parts, line: PlanLine, injected: Injected) -> SlabPool:
    return SlabPool(parts.arenas[line.tier], line.count, line.nbytes, line.purpose, poison=injected.poison)


def _pools(parts: Parts, tier: Tier, counts: dict[int, int], purpose: str, injected: Injected) -> dict[int, SlabPool]:
    return {
        nbytes: SlabPool(parts.arenas[tier], count, nbytes, purpose, poison=injected.poison)
        for nbytes, count in counts.items()
    }


def _slab_bytes(units: Iterable[Any], sizes: list[int]) -> dict[int, int]:
    return {unit.index: nbytes for nbytes, members in slab_classes(list(units), sizes).items() for unit in members}
