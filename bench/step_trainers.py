"""Trains the decoder by plain PyTorch, FSDP2, DeepSpeed or our engine, one class each.

Imported by bench.step_worker in the contestant's own process and environment. Every trainer has ``step`` (one
optimizer step over its micro-batches), ``settle`` (all updates made, all writes done), ``facts`` (its own counters).
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from bench.step_model import LEARNING_RATE, Shape, build_decoder

Batch = tuple[torch.Tensor, torch.Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    """Base of all: adds up the time between marks, by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._mark = time.perf_counter()

    def start(self) -> None:
        self._mark = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._mark
        self._mark = now

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        raise NotImplementedError

    def settle(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"seconds": dict(self.seconds)}

    def close(self) -> None:
        pass


class Plain(Trainer):
    """In memory with fused AdamW. In bf16 the optimizer has fp32 masters, as ours and DeepSpeed's have.

    ``pure`` leaves the masters out: half the bytes, another result.
    """

    def __init__(self, shape: Shape, dtype: str, pure: bool = False) -> None:
        super().__init__()
        self.model = build_decoder(shape)
        parameters = list(self.model.parameters())
        self._masters: list[torch.Tensor] = []
        if dtype != "fp32" and not pure:
            self._masters = [parameter.detach().clone().requires_grad_() for parameter in parameters]
        self.model.to(DTYPES[dtype])
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(self._masters or parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses = []
        for inputs, targets in micro_batches:
            self.start()
            loss = self.model(inputs, targets)
            self.lap("forward")
            (loss if len(micro_batches) == 1 else loss / len(micro_batches)).backward()
            self.lap("backward")
            losses.append(loss.detach())
        for parameter, master in zip(self._parameters, self._masters, strict=bool(self._masters)):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=bool(self._masters)):
                parameter.copy_(master)
        self.lap("optimizer")
        return losses


class Fsdp2(Trainer):
    """FSDP2 on one gloo rank, states offloaded to (the same) host memory; bf16 by its mixed precision policy."""

    def __init__(self, shape: Shape, dtype: str) -> None:
        super().__init__()
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        _one_rank()
        torch.distributed.init_process_group("gloo")
        self.model = build_decoder(shape)
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        if dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses = []
        for inputs, targets in micro_batches:
            self.start()
            loss = self.model(inputs, targets)
            self.lap("forward")
            (loss / len(micro_batches)).backward()
            self.lap("backward")
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.lap("optimizer")
        return losses

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DeepSpeed(Trainer):
    """ZeRO-3 with the states in memory (none), in its offload buffers (cpu) or on NVMe.

    On NVMe it is tuned: pipelined both ways, nothing pinned by the config, 12 buffers, each as big as the largest
    parameter. ``max_in_cpu`` is left at its default, because 0 fails (deepspeedai/DeepSpeed#3062), so parameters
    "on NVMe" stay in RAM; in fp32 they are left in memory altogether, because its swap turns them into bf16.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        placement: str,
        swap: str,
        micro_batches: int = 1,
        aio: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _one_rank()
        import deepspeed

        deepspeed.init_distributed("gloo")
        options: dict[str, Any] = {"stage": 3}
        if placement == "cpu":
            options |= {part: {"device": "cpu", "pin_memory": False} for part in ("offload_param", "offload_optimizer")}
        if placement == "nvme":
            on_disk = {"device": "nvme", "nvme_path": swap, "pin_memory": False}
            largest = max(shape.vocabulary * shape.d_model, 2 * shape.d_ff * shape.d_model)
            options["offload_optimizer"] = on_disk | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
            if dtype != "fp32":
                options["offload_param"] = on_disk | {"buffer_count": 12, "buffer_size": largest}
            options["sub_group_size"] = largest
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "zero_optimization": options | (zero or {}),
            "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True, "single_submit": False}
            | (aio or {}),
            "steps_per_print": 1 << 30,
        }
        self._engine, *_ = deepspeed.initialize(model=build_decoder(shape), config=config)

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses = []
        for inputs, targets in micro_batches:
            self.start()
            loss = self._engine(inputs, targets)
            self.lap("forward")
            self._engine.backward(loss)
            self.lap("backward")
            self._engine.step()
            self.lap("optimizer")
            losses.append(loss.detach())
        return losses

    def close(self) -> None:
        self._engine.destroy()


class Ours(Trainer):
    """Our engine. ``layer_major`` trains by ``engine.train_batch``; ``override`` goes into the config's own block.

    ``profile`` is where to write a Chrome trace of everything at the end.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        placement: str,
        swap: str,
        recompute: bool = False,
        micro_batches: int = 1,
        layer_major: bool = False,
        override: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        aio: dict[str, Any] | None = None,
        profile: str | None = None,
    ) -> None:
        super().__init__()
        import infinity
        from infinity.engine.build import Injected
        from infinity.obs.ledger import Ledger
        from infinity.obs.trace import TracedLedger

        where = {"device": placement, "nvme_path": swap}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where} | (zero or {}),
            "infinity": {"recompute": recompute} | (override or {}),
            "aio": aio or {},
        }
        with infinity.Init(config):
            model = build_decoder(shape)
        self._trace = None if profile is None else TracedLedger()
        self._ledger = self._trace or Ledger()
        self._engine, *_ = infinity.initialize(model, config, injected=Injected(ledger=self._ledger))
        self._layer_major = layer_major
        self._profile = profile

    def step(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        if self._layer_major:
            return list(self._engine.train_batch(micro_batches))
        losses = []
        for inputs, targets in micro_batches:
            loss = self._engine(inputs, targets)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        return losses

    def settle(self) -> None:
        self._engine.settle()

    def facts(self) -> dict[str, Any]:
        report = self._engine.report()
        return {
            "seconds": dict(self._ledger.seconds),
            "stalls": report["stalls"],
            "links": report["links"],
            "report": report,
        }

    def close(self) -> None:
        self._engine.destroy()
        if self._trace is not None and self._profile is not None:
            self._trace.write(self._profile)


TRAINERS = {"plain": Plain, "fsdp2": Fsdp2, "deepspeed": DeepSpeed, "ours": Ours}


def _one_rank() -> None:
    """What a launcher would set for one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
