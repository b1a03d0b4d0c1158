"""Which units are computed again in backward."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from infinity.config import Config


def recomputes(config: Config, path: str, module: nn.Module, *, is_block: bool) -> bool:
    """Whether the activations of an entry are computed again: blocks by default, never the model as a whole."""
    choice = config.infinity.recompute
    if path == "":
        return False
    if isinstance(choice, dict):
        for pattern, wanted in choice.items():
            if type(module).__name__ == pattern or fnmatchcase(path, pattern):
                return wanted
        return is_block
    return is_block if choice == "auto" else choice


def is_free(config: Config, path: str, module: nn.Module, *, is_block: bool) -> bool:
    """Whether an entry that is computed again may keep its activations if the plan finds room: config does not say."""
    choice = config.infinity.recompute
    if isinstance(choice, dict):
        named = any(type(module).__name__ == pattern or fnmatchcase(path, pattern) for pattern in choice)
        return is_block and path != "" and not named
    return is_block and path != "" and choice == "auto"
