"""Builds the two native libraries as plain shared objects, without which the package still runs.

Neither library knows Python or torch, so one wheel serves every Python and every torch, and compiling takes seconds.
A machine without a C++17 compiler gets the same package with a note beside the missing library that says why; the
package then uses its pure-Python fallbacks. Set INFINITY_REQUIRE_NATIVE=1 to make a failed compile fail the install.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("infinity") / "_native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall", "-shared")
HEADERS = (".h", ".hpp", ".inl")


class BuildError(Exception):
    """Why a library was not built, in words for the person who installs."""


class NativeLibrary(Extension):
    """A shared library that ctypes loads; ``optional_flags`` are dropped where the compiler refuses them."""

    def __init__(self, name: str, optional_flags: tuple[str, ...] = ()) -> None:
        self.directory = Path("native") / name
        self.library = f"libinfinity_{name}.so"
        self.note = f"libinfinity_{name}.missing.txt"
        self.optional_flags = optional_flags
        sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / self.directory).glob("*.cpp"))
        super().__init__(f"infinity._native.libinfinity_{name}", sources)

    def is_fresh(self, library: Path) -> bool:
        """Whether ``library`` is newer than everything it was made from."""
        inputs = [ROOT / source for source in self.sources] + [ROOT / "setup.py"]
        inputs += [path for path in (ROOT / self.directory).rglob("*") if path.suffix in HEADERS]
        return library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs)

    def compile(self, library: Path) -> None:
        """Compiles every source in one go. The result appears under its name only when it is whole."""
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        command = [*find_compiler(), *FLAGS, *self.optional_flags, *self.sources, "-o", str(unfinished)]
        try:
            failure = run(command)
            if failure and self.optional_flags:
                failure = run([word for word in command if word not in self.optional_flags])
                if not failure:
                    say(f"{self.library} was built without {' '.join(self.optional_flags)}: it will use one thread.")
            if failure:
                raise BuildError(failure)
            os.replace(unfinished, library)
        finally:
            unfinished.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    """The compiler named by CXX, otherwise the first one on the PATH."""
    if os.environ.get("CXX", "").strip():
        return shlex.split(os.environ["CXX"])
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler was found (looked for {', '.join(COMPILERS)} on the PATH; CXX is not set)")


def run(command: list[str]) -> str:
    """Runs one compile; an empty string when it worked, otherwise what went wrong."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]} could not be started: {error.strerror}"
    if done.returncode == 0:
        return ""
    output = (done.stderr or done.stdout).strip() or "it printed nothing"
    return f"{command[0]} ended with status {done.returncode}: {output[-4000:]}"


def say(text: str) -> None:
    print(f"infinity-offload: {text}", file=sys.stderr, flush=True)


class BuildNative(build_ext):
    """Puts each library beside infinity/_native/library.py, in the wheel or (inplace, editable) in the checkout."""

    def run(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.build_library, self.extensions))

    def build_library(self, native: NativeLibrary) -> None:
        target = self.target_directory() / native.library
        note = self.target_directory() / native.note
        if not native.sources or (native.is_fresh(target) and not self.force):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        note.unlink(missing_ok=True)
        try:
            native.compile(target)
        except BuildError as error:
            target.unlink(missing_ok=True)  # an old library would run code that is no longer in the sources
            if os.environ.get("INFINITY_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise SystemExit(f"infinity-offload: {native.library} was not built: {error}") from None
            note.write_text(f"it was not built when the package was installed: {error}\n", encoding="utf-8")
            say(
                f"WARNING: {native.library} was not built: {error}\n"
                "The install goes on. Training works without this library, but slower: disk I/O, or the optimizer, "
                "runs on its pure-Python fallback.\n"
                "To get it, install a C++17 compiler (Debian, Ubuntu: apt install g++) then install this package again."
            )

    def target_directory(self) -> Path:
        return ROOT / PACKAGE if self.inplace else Path(self.build_lib).absolute() / PACKAGE

    def built_files(self) -> list[str]:
        names = [name for library in self.extensions for name in (library.library, library.note)]
        return [name for name in names if (self.target_directory() / name).exists()]

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / PACKAGE / name) for name in self.built_files()]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {str(Path(self.build_lib) / PACKAGE / name): str(PACKAGE / name) for name in self.built_files()}


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for this platform but for every Python 3: nothing in it is compiled against Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[NativeLibrary("aio"), NativeLibrary("cpu_adam", optional_flags=("-fopenmp",))],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
)
