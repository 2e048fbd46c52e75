#!/usr/bin/env bash
# What a container runs: settings (or nothing) train, anything else is a command. The base image's own entry, which matches the driver's
# libraries, comes first where there is one.
#
#   IMAGE experiment=gpt_1b run.name=first      IMAGE python /opt/megadcp/tools/gpu_check.py      IMAGE bash
set -euo pipefail

if [ $# -eq 0 ] || [[ "$1" == *=* ]] || [[ "$1" == -* ]]; then
    set -- python /opt/megadcp/pretrain_gpt.py "$@"
fi
if [ -x /opt/nvidia/nvidia_entrypoint.sh ]; then
    exec /opt/nvidia/nvidia_entrypoint.sh "$@"
fi
exec "$@"
