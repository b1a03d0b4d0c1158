"""The ``run`` block, which only ``infinity train`` reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator

from infinity.config.values import AS_JSON, Block, Count, Natural, Text, expected


def _model(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise expected("an object that describes the built-in decoder")


class RunConfig(Block):
    """What to train, on what, for how long."""

    model: Annotated[dict[str, Any], PlainValidator(_model, json_schema_input_type=Any), AS_JSON] | None = None
    """Sizes of the built-in decoder: ``{"d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 704}``."""
    data: Text = "stdlib"
    """A text file, a directory of them, or "stdlib": the sources of Python's standard library."""
    sequence_length: Count = 256
    """Tokens per sample."""
    steps: Count = 100
    """Optimizer steps."""
    seed: Natural = 0
    output_dir: Text = "runs/latest"
    checkpoint_every: Natural = 0
    """Steps between checkpoints in ``<output_dir>/checkpoints``; 0 writes one at the end only."""
    keep_last: Natural = 2
    """Checkpoints that are kept, the newest ones; 0 saves none."""
    eval_every: Natural = 0
    """Steps between evaluations; 0 never evaluates."""
    eval_batches: Count = 8
    """Micro batches per evaluation."""
