"""Runs Python source in children that are forked from a process in which torch is imported already.

A fault test wants a process of its own: to limit it, forbid it system calls, signal it, kill it. Importing torch takes
seconds, a fork milliseconds. Read from standard input, one JSON document per line, answered by one line each:
``{"code": ..., "directory": ...}`` starts a child with that source, whose output goes to ``stdout`` and ``stderr`` in
the directory, and answers its process id; ``{"wait": pid}`` answers its exit code, negative for a signal.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import struct
import sys
import threading
import traceback
from typing import Any

SYSTEM_CALLS = {
    "x86_64": {"openat": 257, "io_setup": 206, "io_uring_setup": 425, "audit": 0xC000003E},
    "aarch64": {"openat": 56, "io_setup": 0, "io_uring_setup": 425, "audit": 0xC00000B7},
}[os.uname().machine]
O_DIRECT = os.O_DIRECT


def forbid(name: str, errno: int, *, if_flag: tuple[int, int] | None = None) -> None:
    """Makes a system call fail with ``errno``, as a container's seccomp filter does; ``if_flag``: argument, bits."""
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno
    program = [(load, 0, 0, 0)]
    if if_flag is None:
        program += [(equal, 0, 1, SYSTEM_CALLS[name]), (give, 0, 0, fail), (give, 0, 0, allow)]
    else:
        argument, bits = if_flag
        program += [
            (equal, 0, 3, SYSTEM_CALLS[name]),
            (load, 0, 0, 16 + 8 * argument),
            (any_bit, 0, 1, bits),
            (give, 0, 0, fail),
            (give, 0, 0, allow),
        ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(memory)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    if prctl(no_new_privileges, 1, None, 0, 0) or prctl(seccomp, filter_mode, ctypes.addressof(header), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def command(*arguments: str) -> None:
    """The ``infinity`` command, to the end of the process."""
    from infinity.cli.main import app

    sys.argv = ["infinity", *arguments]
    app()


def _become(request: dict[str, Any]) -> None:
    """Turns this process into the child that ``request`` asks for."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(request["directory"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    code: Any = 0
    try:
        exec(compile(request["code"], "<child>", "exec"), {"forbid": forbid, "command": command})
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    # An interpreter's end but for the seconds it takes to free, so to copy, all of torch.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serves requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it starts by "&"

    # All that a run imports late, also because a child of another user may not read our files.
    import encodings.ascii  # noqa: F401

    import torch._dynamo  # noqa: F401

    import infinity.cli.main
    import infinity.engine.initialize  # noqa: F401

    gc.freeze()  # what children collect is their own
    answers = os.fdopen(os.dup(1), "w")
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                return _become(request)
        print(answer, file=answers, flush=True)
    return None


if __name__ == "__main__":
    main()
