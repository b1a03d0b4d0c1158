"""Which units are computed again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError


def recomputes(config: Config, path: str, module: nn.Module, *, is_block: bool) -> bool:
    """Whether the activations of an entry are computed again: blocks by default, never the model as a whole."""
    choice = config.infinity.recompute
    if path == "":
        return False
    if isinstance(choice, dict):
        for pattern, wanted in choice.items():
            if _names(pattern, path, module):
                return wanted
        return is_block
    return is_block if choice == "auto" else choice


def is_free(config: Config, path: str, module: nn.Module, *, is_block: bool) -> bool:
    """Whether an entry that is computed again may keep its activations if the plan finds room: config does not say."""
    choice = config.infinity.recompute
    if isinstance(choice, dict):
        named = any(_names(pattern, path, module) for pattern in choice)
        return is_block and path != "" and not named
    return is_block and path != "" and choice == "auto"


def check_patterns(config: Config, units: Mapping[str, nn.Module]) -> None:
    """Raises ``ConfigError`` for patterns of ``infinity.recompute`` that name none of ``units``, modules by path."""
    choice = config.infinity.recompute
    patterns = choice if isinstance(choice, dict) else {}
    idle = [p for p in patterns if not any(_names(p, path, module) for path, module in units.items())]
    if idle:
        classes = sorted({type(module).__name__ for path, module in units.items() if path})
        paths = [path for path in units if path]
        raise ConfigError(
            [
                f'infinity.recompute: "{pattern}" matches no unit; expected a class name ({", ".join(classes[:12])}), '
                f"or a pattern for names of units, which are {', '.join(paths[:6])}{', ...' if paths[6:] else ''}"
                for pattern in idle
            ]
        )


def _names(pattern: str, path: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatchcase(path, pattern)
