"""Turns what pydantic found into sentences that a person can act on."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Key = tuple[str | int, ...]

RENAMED = {
    "bfloat16": 'write `bf16`, as in "bf16": {"enabled": true}',
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_params": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'write "pin_memory": true in `offload_param` or `offload_optimizer`',
    "sparse_attention": "it changes the model, which is left to the model's own code here",
    "train_micro_batch_size": "write `train_micro_batch_size_per_gpu`",
    "micro_batch_size": "write `train_micro_batch_size_per_gpu`",
    "batch_size": "write `train_batch_size` (all ranks) or `train_micro_batch_size_per_gpu` (one rank)",
}
"""Keys that people bring along, then what to write for them."""

TRAINER = {
    "gradient_clipping": "its `max_grad_norm` (1.0 by default)",
    "fp16.enabled": "its `fp16` (false by default)",
    "bf16.enabled": "its `bf16` (false by default)",
    "optimizer.params.lr": "its `learning_rate` (5e-5 by default)",
    "optimizer.params.betas": "its `adam_beta1`, `adam_beta2` ([0.9, 0.999] by default)",
    "optimizer.params.eps": "its `adam_epsilon` (1e-8 by default)",
    "optimizer.params.weight_decay": "its `weight_decay` (0.0 by default)",
    "scheduler.params.warmup_min_lr": "0.0",
    "scheduler.params.warmup_max_lr": "its `learning_rate` (5e-5 by default)",
    "scheduler.params.warmup_num_steps": "its `warmup_steps` (0 by default)",
    "scheduler.params.total_num_steps": "its `max_steps`, or the steps that its data last for",
}
"""What Hugging Face's Trainer puts where a DeepSpeed config says "auto", of keys that nothing is known of here."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
}


def dotted(key: Key) -> str:
    """``a.b[0].c``"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def shown(value: object) -> str:
    """A value as it would stand in the file, cut to one short line."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return "a number too long to show" if isinstance(value, int) else f"a {type(value).__name__}"
    return written if len(written) <= 80 else f"{written[:60]}... ({len(written)} characters)"


def sentence(error: ErrorDetails, root: type[BaseModel], at: Key = ()) -> str:
    """One fault of a value under ``root``, which itself stands at key ``at``."""
    kind, here, value = error["type"], error["loc"], error["input"]
    name = f"`{dotted((*at, *here))}`"
    if kind == "extra_forbidden":
        return unknown_key(here, root, at)
    if value == "auto" and (source := TRAINER.get(dotted((*at, *here)))):
        return (
            f'{name} is "auto", which Hugging Face\'s Trainer replaces by {source}; nothing replaces it here, so write '
            "the value, or leave the key out for the default here."
        )
    if kind == "missing":
        return f"{name} is missing; add it to `{dotted((*at, *here[:-1]))}`, since nothing can be assumed for it."
    if kind == "expected":
        must = str(error["ctx"]["phrase"])
    elif kind == "literal_error":
        must = str(error["ctx"]["expected"]).replace("'", '"').replace("False", "false (or left out)")
        close = difflib.get_close_matches(str(value), [word.strip('" ') for word in must.split(",")], n=1)
        must = f"{must}; did you mean {shown(close[0])}?" if close else must
    elif kind in ("model_type", "model_attributes_type"):
        block = block_at(root, here)
        keys = ", ".join(list(block.model_fields)[:4]) if block else ""
        must = f"an object with keys such as {keys}"
    else:
        must = EXPECTED.get(kind) or f"something else: {error['msg']}"
    return f"{name} is {shown(value)}, but it must be {must}{'' if must.endswith('?') else '.'}"


def unknown_key(here: Key, root: type[BaseModel], at: Key = ()) -> str:
    """Names the key, then the key that was probably meant, wherever that belongs."""
    name, given = f"`{dotted((*at, *here))}`", str(here[-1])
    if given in RENAMED:
        return f"{name} is not a key here; {RENAMED[given]}."
    block = block_at(root, here[:-1])
    siblings = list(block.model_fields) if block else []
    lowered = {sibling.lower(): sibling for sibling in siblings}
    close = difflib.get_close_matches(given.lower(), list(lowered), n=1, cutoff=0.75)
    if close:
        return f"{name} is not a known key; did you mean `{dotted((*at, *here[:-1], lowered[close[0]]))}`?"
    elsewhere = [(*at, *key) for key in every_key(root) if key[-1] == given]
    if elsewhere:
        return f"{name} is not a known key; it belongs at {' or '.join(f'`{dotted(key)}`' for key in elsewhere[:3])}."
    close = difflib.get_close_matches(given.lower(), list(lowered), n=1, cutoff=0.5)
    if close:
        return f"{name} is not a known key; did you mean `{dotted((*at, *here[:-1], lowered[close[0]]))}`?"
    where = f"`{dotted((*at, *here[:-1]))}`" if (*at, *here[:-1]) else "the top level"
    return f"{name} is not a known key; {where} knows {_list(siblings)}."


def _list(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])} ... ({len(names)} keys)"


def block_at(root: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The block that a key leads to, or None where it ends in a plain value."""
    block: type[BaseModel] | None = root
    for part in key:
        field = block.model_fields.get(str(part)) if block else None
        block = block_in(field.annotation) if field else None
    return block


def block_in(annotation: Any) -> type[BaseModel] | None:
    """The block that a field holds, optional or not."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next((found for part in typing.get_args(annotation) if (found := block_in(part))), None)
    return None


def every_key(root: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    for name, field in root.model_fields.items():
        yield (*at, name)
        block = block_in(field.annotation)
        if block:
            yield from every_key(block, (*at, name))
