#!/usr/bin/env bash
# Installs DeepSpeed for the benches into bench/.deepspeed-venv, with the two native ops they use compiled.
#
#   bench/setup_deepspeed.sh [PYTHON]
#
# Takes about five minutes on two cores. INFINITY_DEEPSPEED_VENV names another place, here and for the benches.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${INFINITY_DEEPSPEED_VENV:-$here/.deepspeed-venv}
python=${1:-python3}

# The async_io op needs libaio with its header. Without the header DeepSpeed calls the op compatible, then fails to build.
if ! echo '#include <libaio.h>' | c++ -E -x c++ - >/dev/null 2>&1; then
    root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    "${root[@]}" apt-get install -y libaio-dev || { "${root[@]}" apt-get update && "${root[@]}" apt-get install -y libaio-dev; }
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# torch first, in the version that the package itself is measured with: DeepSpeed would take any.
"$venv/bin/pip" install -q "torch==2.13.0" numpy ninja
"$venv/bin/pip" install -q deepspeed

export DS_ACCELERATOR=cpu MAX_JOBS=${MAX_JOBS:-$(nproc)}
PATH="$venv/bin:$PATH" "$venv/bin/python" - <<'PYTHON'
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

for builder in (CPUAdamBuilder(), AsyncIOBuilder()):
    builder.load(verbose=False)
    print(f"{builder.name}: compiled")
PYTHON
