#!/usr/bin/env bash
# The GPU matrix in one call of under 10 minutes on one GPU: RLOO and PPO of a 1 B policy (random weights, bf16, prompts of 512
# tokens, 53 new ones, batch 64) against TRL, and decoding against generate. Writes OUT/table.md, and every run as OUT/*.json.
#
#     bash benchmark/checks/gpu.sh OUT              on one GPU
#     bash benchmark/checks/gpu.sh OUT --dry_run    the same on the CPU with tiny models, in a minute or two
#
# What TRL runs in, as environment variables; with neither, TRL is left out and the table says so:
#     WHEELS        folder of wheels (trl, for 0.21 also its transformers, tokenizers, huggingface_hub): a machine without a network
#     ENVIRONMENTS  folder of environments trl-VERSION; a missing one is created from PyPI
# Others: PYTHON, ALTERNATIONS, MICRO (episodes of a training forward, ours and TRL's), RLOO_VARIANTS and PPO_VARIANTS (ours with
# flags off, as "name:--flag ...", separated by semicolons). A part that runs out of its time leaves what it has measured.
set -uo pipefail
OUT=${1:?usage: gpu.sh OUT [--dry_run]}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}

WORK=(--size 1b --prompts 512 512 --response_length 53 --batch_size 64 --alternations "${ALTERNATIONS:-3}" --updates 2)
MICRO=${MICRO:-16}
if [[ ${2:-} == --dry_run ]]; then
    export CUDA_VISIBLE_DEVICES=""
    WORK=(--size 0.9m --prompts 16 16 --response_length 8 --batch_size 8 --alternations "${ALTERNATIONS:-1}" --updates 1)
    MICRO=4
fi
WORK+=(--precision bf16 --rloo_k 4 --work_dir "$OUT/work")

# part NAME SECONDS COMMAND...: runs speed.py within SECONDS, appends its table to OUT/table.md
part() {
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$PYTHON" benchmark/speed.py "$@" "${WORK[@]}" --output "$OUT/$name" 2>&1 | tee "$OUT/$name.log"
    local code=${PIPESTATUS[0]}
    {
        echo
        [[ -f $OUT/$name.md ]] && cat "$OUT/$name.md"
        ((code == 124)) && echo "$name: stopped after $limit seconds; the table holds the alternations before."
        ((code != 0 && code != 124)) && echo "$name: failed with exit code $code: $(tail -n 1 "$OUT/$name.log")"
    } >>"$OUT/table.md"
    failed=$((failed + (code != 0)))
}

against=(--against)
where=()
if [[ -n ${WHEELS:-} ]]; then
    where=(--wheels "$(cd "$WHEELS" && pwd)")
elif [[ -n ${ENVIRONMENTS:-} ]]; then
    mkdir -p "$ENVIRONMENTS"
    where=(--environments "$(cd "$ENVIRONMENTS" && pwd)")
fi
IFS=';' read -ra rloo_variants <<<"${RLOO_VARIANTS-plain:--no_share_prompts}"
IFS=';' read -ra ppo_variants <<<"${PPO_VARIANTS-}"
with=(--micro_batch_size "$MICRO" --trl_micro_batch_size "$MICRO" "${where[@]}")

failed=0
rm -f "$OUT"/{table,rloo,ppo,decode}.md
[[ ${#where[@]} == 0 ]] && echo "TRL: not measured, neither WHEELS nor ENVIRONMENTS was given." >"$OUT/table.md"
part rloo 260 compare --algorithm rloo "${with[@]}" "${against[@]}" ${where:+1.16.0} --variants "${rloo_variants[@]}"
part decode 80 decode
part ppo 240 compare --algorithm ppo "${with[@]}" "${against[@]}" ${where:+0.21.0} --variants "${ppo_variants[@]}"
rm -rf "$OUT/work/0.9m_own" "$OUT/work/1b_own"
echo
cat "$OUT/table.md"
exit $((failed > 0))
