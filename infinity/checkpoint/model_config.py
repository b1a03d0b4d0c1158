"""Keeps a Hugging Face model's config as text, so that from_pretrained needs nothing but an export."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.disk import Disk, replace_file

log = logging.getLogger("infinity")

FILES = {"config": "config.json", "generation_config": "generation_config.json"}
"""By the attribute of the model that knows how to say itself in JSON."""


def config_files(module: nn.Module) -> dict[str, str]:
    """The text of each file, by its name; nothing for a model that is none of transformers'."""
    found = {}
    for attribute, name in FILES.items():
        speak: Any = getattr(getattr(module, attribute, None), "to_json_string", None)
        if not callable(speak):
            continue
        try:
            document = json.loads(speak())
        except (TypeError, ValueError) as error:  # no reason not to save the weights
            log.warning("%s of the model cannot be kept: it does not say itself in JSON: %s", attribute, error)
            continue
        if isinstance(document, dict):
            named = {"architectures": [type(module).__name__]} if attribute == "config" else {}
            found[name] = _text(document | named)
    return found


def write_config_files(
    directory: str | os.PathLike[str], files: Mapping[str, str], dtype: torch.dtype | None, disk: Disk | None = None
) -> list[str]:
    """Writes what ``config_files`` found beside weights of ``dtype``; returns the paths."""
    disk, paths = disk or Disk(), []
    for name in FILES.values():
        if name not in files:
            continue
        text = files[name]
        if name == FILES["config"] and dtype is not None:
            document = json.loads(text)
            key = "torch_dtype" if "torch_dtype" in document else "dtype"
            text = _text(document | {key: str(dtype).removeprefix("torch.")})
        paths.append(os.path.join(os.path.abspath(directory), name))
        replace_file(disk, paths[-1], text.encode())
    return paths


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
