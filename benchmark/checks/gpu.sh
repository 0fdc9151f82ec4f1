#!/usr/bin/env bash
# The first hour on a GPU, in parts that take at most ten minutes each:
#
#     bash benchmark/checks/gpu.sh OUT          has each page the CPU's numbers there, in fp32 and in bf16 (gpu.py)?
#     bash benchmark/checks/gpu.sh OUT speed    our sampler beside `generate`, RLOO and PPO beside TRL, a policy of 1 B
#
# The second part runs the programs of commit cb7f9d2, whose sampler and loop compute what today's do. It needs the git
# history, and what TRL runs in is said there (WHEELS, ENVIRONMENTS).
set -euo pipefail
OUT=${1:?usage: gpu.sh OUT [speed]}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ${2:-} == speed ]]; then
    scratch=$(mktemp -d)
    trap 'git worktree remove --force "$scratch/tree"' EXIT
    git worktree add -q --detach "$scratch/tree" cb7f9d2
    bash "$scratch/tree/benchmark/checks/gpu.sh" "$OUT/speed" "${@:3}" decode rloo ppo
else
    "${PYTHON:-python3}" benchmark/checks/gpu.py "$OUT/pages" | tee "$OUT/table.md"
fi
