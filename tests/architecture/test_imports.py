"""Checks the import rules of the package by reading its source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "infinity"

LAYERS = {
    "config": 0, "obs": 0, "errors": 0, "tier": 0,
    "shard": 1, "plan": 1,
    "device": 2, "memory": 2, "comm": 2, "storage": 2, "_native": 2,
    "stream": 3,
    "optim": 4,
    "engine": 5, "checkpoint": 5, "nn": 5,
    "integrations": 6, "cli": 6, "data": 6, "report": 6, "__init__": 6, "__main__": 6,
}  # fmt: skip
"""The rooms from the ground up. A room imports from its own layer or below."""

MAY_NAME_CUDA = ("device/cuda.py", "cli/doctor.py")
CONFIG_MAY_IMPORT = {"pydantic", "pydantic_core", "yaml"}


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imported_modules(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Every module that is imported anywhere in the file, as an absolute dotted name."""
    package = ["infinity", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def names(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Everything imported, then every dotted name that is used."""
    yield from imported_modules(tree, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def is_under(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def faults_in_file(path: str, source: str) -> Iterator[str]:
    """One line per broken rule; ``path`` is relative to the package."""
    tree = ast.parse(source)
    room = room_of(path)
    if room not in LAYERS:
        yield f"{path}: room {room!r} has no layer in the table of this test"
        return

    docstring = (ast.get_docstring(tree) or "").strip()
    if not docstring:
        yield f"{path}: has no docstring"
    elif " and " in docstring.splitlines()[0]:
        yield f"{path}: first line of the docstring says 'and', so the module does two things"

    for line, name in imported_modules(tree, path):
        parts = name.split(".")
        if parts[0] == "infinity":
            target = parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__"
            if LAYERS[target] > LAYERS[room]:
                yield f"{path}:{line}: imports {name}, upward from layer {LAYERS[room]} to {LAYERS[target]}"
        if parts[0] == "ctypes" and room != "_native":
            yield f"{path}:{line}: imports ctypes, which belongs to _native"
        if room == "config" and parts[0] not in sys.stdlib_module_names | CONFIG_MAY_IMPORT | {"infinity"}:
            yield f"{path}:{line}: imports {name}; config reads without {parts[0]}"
        if path == "nn/decoder.py" and parts[0] not in sys.stdlib_module_names | {"torch"}:
            yield f"{path}:{line}: imports {name}; the decoder is a plain torch model"

    for line, name in sorted(set(names(tree, path))):
        if (is_under(name, "torch.cuda") or is_under(name, "cupy")) and path not in MAY_NAME_CUDA:
            yield f"{path}:{line}: names {name}, which belongs to device/cuda.py"
        if is_under(name, "torch.distributed") and room != "comm":
            yield f"{path}:{line}: names {name}, which belongs to comm"

    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for call in ast.walk(node):
                if isinstance(call, ast.Attribute) and call.attr in ("wait", "result"):
                    yield f"{path}:{node.lineno}: assert contains .{call.attr}(, which python -O would leave out"


def module_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Which files each file imports. The package's own ``__init__``, which names everything, is left out."""
    graph: dict[str, set[str]] = {path: set() for path in files}
    for path, source in files.items():
        for _, name in imported_modules(ast.parse(source), path):
            parts = name.split(".")
            for length in range(len(parts), 1, -1):
                stem = "/".join(parts[1:length])
                target = next((found for found in (f"{stem}.py", f"{stem}/__init__.py") if found in files), None)
                if target:
                    graph[path].add(target)
                    break
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Some chain of files that imports its own start, or an empty list."""
    done: set[str] = set()

    def walk(path: str, chain: list[str]) -> list[str]:
        if path in chain:
            return [*chain[chain.index(path) :], path]
        if path in done:
            return []
        found = next((found for target in sorted(graph[path]) if (found := walk(target, [*chain, path]))), [])
        done.add(path)
        return found

    return next((found for path in sorted(graph) if (found := walk(path, []))), [])


def faults(root: Path) -> list[str]:
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    found = [fault for path, source in files.items() for fault in faults_in_file(path, source)]
    cycle = cycle_in(module_graph(files))
    return found + ([f"files import each other in a circle: {' -> '.join(cycle)}"] if cycle else [])


def test_the_package_keeps_its_rules() -> None:
    assert (PACKAGE / "tier.py").exists()
    assert faults(PACKAGE) == []


PLANTED = {
    "an upward import": ("shard/a.py", "from infinity.engine import build", "upward from layer 1 to 5"),
    "an upward relative import": ("shard/a.py", "from ..engine import build", "upward from layer 1 to 5"),
    "an upward import inside a function": ("obs/a.py", "def f():\n    import infinity.plan", "upward from layer 0"),
    "an import of the whole package": ("optim/a.py", "import infinity", "upward from layer 4 to 6"),
    "ctypes": ("storage/a.py", "import ctypes", "imports ctypes"),
    "from ctypes": ("storage/a.py", "from ctypes import util", "imports ctypes"),
    "torch.cuda by attribute": ("engine/a.py", "import torch\nx = torch.cuda.is_available()", "names torch.cuda"),
    "torch.cuda by import": ("memory/a.py", "from torch import cuda", "names torch.cuda"),
    "cupy": ("memory/a.py", "import cupy as cp", "names cupy"),
    "cupy by its name": ("memory/a.py", "import importlib\nx = importlib.import_module('cupy')", "names cupy"),
    "torch.distributed": ("engine/a.py", "import torch.distributed as dist", "names torch.distributed"),
    "torch.distributed by attribute": ("engine/a.py", "import torch\nx = torch.distributed", "names torch.distributed"),
    "torch in config": ("config/a.py", "import torch", "config reads without torch"),
    "the package in the decoder": ("nn/decoder.py", "from infinity.tier import Tier", "a plain torch model"),
    "numpy in the decoder": ("nn/decoder.py", "import numpy", "a plain torch model"),
    "a wait in an assert": ("comm/a.py", "def f(t):\n    assert t.wait() is None", "assert contains .wait("),
    "a result in an assert": ("comm/a.py", "def f(t):\n    assert len(t.result()) > 1", "assert contains .result("),
    "a room nobody knows": ("utils.py", "x = 1", "has no layer"),
}


@pytest.mark.parametrize(("path", "body", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(tmp_path: Path, path: str, body: str, expected: str) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(f'"""Does one thing."""\n{body}\n')
    found = faults(tmp_path)
    assert found
    assert all(fault.startswith(path) and expected in fault for fault in found)


@pytest.mark.parametrize("text", ["x = 1\n", '"""Reads this and that."""\n', '""""""\n'])
def test_a_docstring_that_is_missing_or_says_and_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "tier.py").write_text(text)
    assert len(faults(tmp_path)) == 1


def test_a_circle_in_one_layer_is_found(tmp_path: Path) -> None:
    for room, target in (("memory", "storage"), ("storage", "device"), ("device", "memory")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text(f'"""Does one thing."""\nfrom infinity.{target} import a\n')
    circle = "device/a.py -> memory/a.py -> storage/a.py -> device/a.py"
    assert faults(tmp_path) == [f"files import each other in a circle: {circle}"]


def test_allowed_places_are_allowed(tmp_path: Path) -> None:
    allowed = {
        "_native/a.py": "import ctypes",
        "device/cuda.py": "import cupy, torch\nx = torch.cuda",
        "cli/doctor.py": "import torch\nx = torch.cuda.is_available()",
        "comm/a.py": "import torch.distributed",
        "config/a.py": "import json, yaml\nfrom pydantic import BaseModel\nfrom infinity.tier import Tier",
        "nn/decoder.py": "import math, torch\nfrom torch import nn",
        "storage/a.py": "from infinity._native import aio",
        "memory/a.py": "def f(t):\n    t.wait()\n    assert t.done()",
    }
    for path, body in allowed.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f'"""Does one thing."""\n{body}\n')
    assert faults(tmp_path) == []
