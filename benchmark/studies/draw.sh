#!/usr/bin/env bash
# Draws the figures of README and site anew, and writes every table of the studies, from the runs in benchmark/results:
#
#     bash benchmark/studies/draw.sh
#
# Where nothing was run or changed since, no committed file changes. (openrlbenchmark.png needs that tool: see
# docs/evidence/6_comparing_versions.md; layout.svg is drawn by hand.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python}
draw() { "$python" "benchmark/$1.py" "${@:2}" > /dev/null; }

draw studies/toy draw
draw studies/overoptimisation draw --tag cc51011
draw studies/ablations draw --tags cc51011 f1166b3
draw plot same ablations@f1166b3_amd ablations@cc51011 --output benchmark/results/cc51011/ablations_same.md
draw studies/movies draw --tag cc51011 --dpo f6f8b6b
draw studies/study draw all
draw studies/smollm draw --tag 5b18bbb --more f6f8b6b
draw studies/smollm_trl draw --tag 0feb1d3
draw studies/symptoms draw --tag 2f03d62
draw studies/against_trl draw --tag cc51011 --study trl_toy_100x64 --output static/trl_long.svg
draw studies/against_trl draw --tag cc6b272 --study trl_lengths_100x64 --output static/trl_lengths.svg
draw studies/against_trl draw --tag 4d93adb --output static/trl_grpo.svg
draw plot benchmark/results/rloo_toy --output static/curves.png
draw checks/details
draw checks/readme
