"""Trains the built-in decoder on text as a config says."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import infinity
from infinity.cli.checkpoints import RunCheckpoints, keep_metrics
from infinity.cli.failures import Stopped
from infinity.cli.floor import measure_floor
from infinity.cli.measure import StepMeter, tier_use
from infinity.cli.progress import Heading, LogLines, Shown, open_progress
from infinity.cli.signals import StopRequest
from infinity.cli.summary import ProcessMemory, Summary
from infinity.comm import rank_expected, ranks_expected
from infinity.config import Config
from infinity.data import ByteLoader, Corpus, evaluation_batches
from infinity.errors import ConfigError, StorageError, WearError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.obs.metrics import MetricsWriter
from infinity.obs.process_memory import AnonymousPeak, status_bytes

Batches = Sequence[tuple[Tensor, Tensor]]


def train(
    config: Config, console: Console, *, with_floor: bool = False, resume: str | None = None, saves: bool = True
) -> Summary:
    """Train to the last step; ``with_floor`` measures first what torch and the activations cost by themselves.

    Writes ``config.resolved.json``, ``metrics.jsonl`` and ``checkpoints/`` to ``run.output_dir``. ``resume``: "auto"
    or a directory of checkpoints. Without ``saves`` there are none. Raises ``Stopped`` after a signal.
    """
    rank, world_size = rank_expected(), ranks_expected()
    shape = decoder_config(config)
    if rank:
        console = Console(quiet=True)
    shown = open_progress(console, every=config.steps_per_print or 0)
    with AnonymousPeak() as memory, _logging_through(shown), StopRequest(shown.say) as stop:
        try:
            run = _Run(config, shape, shown, stop, rank, world_size, resume)
            floor = run.floor() if with_floor else None
            run.saves = saves
            run.train()
            return run.summary(memory, floor)
        except KeyboardInterrupt:
            told = f"at once; the swap files are gone, {config.run.output_dir} keeps the metrics."
            raise Stopped(stop.signal_number or signal.SIGINT, told) from None
        finally:
            shown.close()


def decoder_config(config: Config) -> DecoderConfig:
    """``run.model`` as the shape of a decoder."""
    names = {field.name for field in fields(DecoderConfig)}
    needed = 'such as {"d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 704}'
    given = config.run.model
    if given is None:
        raise ConfigError(f"`run.model` is not given, but `infinity train` needs the sizes of its decoder, {needed}.")
    if unknown := sorted(set(given) - names):
        raise ConfigError(
            f"`run.model.{unknown[0]}` is not a key of the decoder; known are {', '.join(sorted(names))}."
        )
    try:
        return DecoderConfig(**given)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"`run.model` does not describe a decoder ({error}); expected sizes {needed}.") from None


def seed_everything(seed: int) -> None:
    """Every generator that a model may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class _Run:
    """One run from its first byte of text to its last step."""

    def __init__(
        self,
        config: Config,
        shape: DecoderConfig,
        shown: Shown,
        stop: StopRequest,
        rank: int,
        world_size: int,
        resume: str | None,
    ) -> None:
        self._config, self._shape, self._shown, self._stop = config, shape, shown, stop
        self._world_size, self._is_first = world_size, rank == 0
        self._batch = config.resolve_batch(world_size)
        self._output = Path(config.run.output_dir)
        self._prepare_output()
        self._checkpoints = RunCheckpoints(self._output, config.run, resume, shown.saving)
        self.saves = True
        seed_everything(config.run.seed)
        self._corpus = Corpus.open(config.run.data)
        sizes = {"batch_size": self._batch.micro_batch_size, "sequence_length": config.run.sequence_length}
        self._loader = ByteLoader(self._corpus, **sizes, seed=config.run.seed, rank=rank, world_size=world_size)
        self._held_back: Batches = ()
        if config.run.eval_every:
            self._held_back = evaluation_batches(self._corpus, batches=config.run.eval_batches, **sizes)
        self._anonymous_before_model = status_bytes("RssAnon")
        self._losses: dict[int, float] = {}
        self._last_loss: float | None = None
        self._done, self._seconds = 0, 0.0
        self._report: dict[str, Any] = {}

    def _prepare_output(self) -> None:
        """Before anything that takes long, so that a directory that cannot be written is known at once."""
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            if self._is_first:
                (self._output / "config.resolved.json").write_text(self._config.to_json(), encoding="utf-8")
        except OSError as error:
            raise StorageError(
                "cannot write run.output_dir",
                path=str(self._output),
                errno=error.errno,
                action="Choose a directory this user may write to, on a disk with space",
            ) from None

    def floor(self) -> int:
        """What the same batch costs in anonymous memory without this package."""
        self._shown.say("measuring what torch and the activations cost by themselves")
        dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[self._config.param_dtype]
        return measure_floor(
            asdict(self._shape),
            batch_size=self._batch.micro_batch_size,
            sequence_length=self._config.run.sequence_length,
            dtype=dtype,
            recompute=self._config.infinity.recompute is not False,
        )

    def train(self) -> None:
        """Build the model on its tiers, train it, take everything down again."""
        settings = self._config.with_overrides(["steps_per_print=0"])  # what a step was is told here, once
        with torch.device("meta"):
            tokens = torch.zeros(self._batch.micro_batch_size, settings.run.sequence_length, dtype=torch.long)
            batch = tokens, tokens
            # What cannot fit is not built.
            infinity.plan(Decoder(self._shape), settings, self._world_size, micro_batch=batch)
        with infinity.Init(settings):
            model = Decoder(self._shape)
        engine, _, _, _ = infinity.initialize(model=model, config=settings, micro_batch=batch)
        try:
            done = self._done = self._checkpoints.resume(engine, self._loader)
            if self._is_first:
                keep_metrics(self._output / "metrics.jsonl", done)
            with MetricsWriter(self._output / "metrics.jsonl" if self._is_first else os.devnull) as metrics:
                self._shown.begin(heading := self._heading(engine))
                metrics.write({"event": "start", **asdict(heading), "world_size": self._world_size, "after": done})
                if done >= self._config.run.steps:
                    self._shown.say(f"nothing is left to do: {done} steps are done; raise run.steps to train on")
                self._loop(engine, metrics, done)
            self._report = engine.report()
        finally:
            self._stop.ending()
            engine.destroy()

    def _loop(self, engine: Any, metrics: MetricsWriter, done: int) -> None:
        run, meter = self._config.run, StepMeter()
        tokens = self._batch.train_batch_size * run.sequence_length
        if not done:
            self._evaluate(engine, metrics, 0)
        for step in range(done + 1, run.steps + 1):
            self._check(engine, step - 1)
            meter.start(engine.report())
            learning_rate = float(engine.get_lr()[0])
            total, worn = torch.zeros(()), None
            for _ in range(self._batch.accumulation_steps):
                inputs, targets = (tensor.to(engine.device) for tensor in self._loader.next_batch())
                loss = engine(inputs, targets)
                engine.backward(loss)
                try:
                    engine.step()
                except WearError as error:
                    worn = error
                total = total + loss.detach().float().cpu()
            loss = engine.averaged(float(total) / self._batch.accumulation_steps)
            record = meter.finish(
                engine.report(),
                step=step,
                loss=loss,
                learning_rate=learning_rate,
                gradient_norm=engine.get_global_grad_norm(),
                tokens=tokens,
            )
            self._last_loss, self._seconds = record.loss, self._seconds + record.seconds
            self._shown.step(record)
            metrics.write(record.as_json())
            if step == run.steps or (run.eval_every and step % run.eval_every == 0):
                self._evaluate(engine, metrics, step)
            if worn is not None:
                saved = self._checkpoints.save(engine, self._loader) if self.saves else None
                raise WearError(f"{worn}; {f'{saved} holds' if saved else 'nothing keeps'} the {step} steps done")
            if self.saves and self._checkpoints.is_due(step):
                self._checkpoints.begin(engine, self._loader)
        start = time.perf_counter()
        engine.settle()
        self._seconds += time.perf_counter() - start
        if self.saves:
            self._checkpoints.save(engine, self._loader)

    def _evaluate(self, engine: Any, metrics: MetricsWriter, step: int) -> None:
        if not self._held_back:
            return
        engine.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, targets in self._held_back:
                if self._world_size == 1:
                    self._check(engine, step)
                total += float(engine(inputs.to(engine.device), targets.to(engine.device)))
        engine.train()
        self._losses[step] = loss = total / len(self._held_back)
        self._shown.evaluated(step, loss)
        metrics.write(
            {"event": "evaluation", "step": step, "loss": loss, "unigram_entropy": self._corpus.unigram_entropy}
        )

    def _check(self, engine: Any, steps: int) -> None:
        """Ends the run after a signal to any rank, with a checkpoint of what was done so far."""
        number = self._stop.signal_number
        if self._world_size > 1 and engine.averaged(float(number is not None)):
            number = self._stop.signal_number = number or signal.SIGTERM
        if number is None:
            return
        engine.train()
        saved = self._checkpoints.save(engine, self._loader) if steps else None
        kept = f"{saved} holds them, --resume auto goes on from there" if saved else "nothing was saved"
        told = f"after {steps} of {self._config.run.steps} steps; {kept}; the swap files are gone."
        raise Stopped(number, told)

    def _heading(self, engine: Any) -> Heading:
        report = engine.report()
        return Heading(
            parameters=report["parameters"],
            dtype=self._config.param_dtype,
            steps=self._config.run.steps,
            micro_batch=self._batch.micro_batch_size,
            accumulation=self._batch.accumulation_steps,
            ranks=self._world_size,
            sequence_length=self._config.run.sequence_length,
            seed=self._config.run.seed,
            corpus=self._corpus.source,
            train_bytes=len(self._corpus.train),
            held_back_bytes=len(self._corpus.held_back),
            unigram_entropy=self._corpus.unigram_entropy,
            io_engine=report["io_engine"],
            isa=report["isa"],
        )

    def summary(self, memory: AnonymousPeak, floor: int | None) -> Summary:
        """The finished run in numbers, also the last line of the metrics."""
        report, steps = self._report, self._config.run.steps
        done = max(0, steps - self._done)
        tokens = done * self._batch.train_batch_size * self._config.run.sequence_length
        summary = Summary(
            parameters=report["parameters"],
            steps=steps,
            steps_done=done,
            seconds=self._seconds,
            tokens_per_second=tokens / self._seconds,
            last_loss=self._last_loss,
            held_back=self._losses,
            unigram_entropy=self._corpus.unigram_entropy,
            tiers=tier_use(report),
            nvme_read_per_step=report["nvme_last_step"]["read"],
            nvme_written_per_step=report["nvme_last_step"]["written"],
            swap_left=_files_in(report["swap_directories"]),
            memory=ProcessMemory(self._anonymous_before_model, memory.peak_bytes, status_bytes("VmHWM"), floor),
            output_dir=str(self._output),
        )
        if self._is_first:
            with MetricsWriter(self._output / "metrics.jsonl") as metrics:
                metrics.write(summary.as_json())
        return summary


def _files_in(directories: Sequence[str]) -> list[str]:
    return [str(path) for directory in directories for path in sorted(Path(directory).rglob("*")) if path.is_file()]


@contextmanager
def _logging_through(shown: Shown) -> Iterator[None]:
    log, handler = logging.getLogger("infinity"), LogLines(shown)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
