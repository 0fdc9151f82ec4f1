#!/usr/bin/env bash
# The first hour on a GPU, in parts that each stand alone, take at most ten minutes, and half an hour together:
#
#     pages    does each page run there, in fp32 and in bf16, and has it the CPU's numbers?           gpu.py, 5 minutes at most
#     noise    what does the noise of a token cost, and what would torch.compile save?                gpu.py, 2
#     decode   our sampler against transformers' generate, a policy of 1 B                            speed.py, 3
#     rloo     RLOO against TRL: 1 B, random weights, bf16, prompts of 512 tokens, 53 new, batch 64   speed.py, 8
#     ppo      PPO against TRL, the same work                                                         speed.py, 8
#
#     bash benchmark/checks/gpu.sh OUT [--dry_run] [PART ...]      these parts, all of them where none is named
#
# --dry_run takes tiny sizes, for the CPU. A part that fails or runs out of its time leaves what it has measured, and the next one
# starts. OUT/table.md has a section for each part, and OUT/PART its log and numbers. The exit code tells whether all went well.
#
# What TRL runs in, as environment variables; with neither, TRL is left out and the table says so:
#     WHEELS        folder of wheels (trl, for 0.21 also its transformers, tokenizers, huggingface_hub): a machine without a network
#     ENVIRONMENTS  folder of environments trl-VERSION; a missing one is created from PyPI
# Others: PYTHON, ALTERNATIONS, MICRO (episodes of a training forward, ours and TRL's), RLOO_VARIANTS and PPO_VARIANTS (ours with
# flags off, as "name:--flag ...", separated by semicolons).
set -uo pipefail
ALL=(pages noise decode rloo ppo)
OUT=${1:?usage: gpu.sh OUT [--dry_run] [PART ...]}
shift
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
MICRO=${MICRO:-16}

device=cuda noise=()
work=(--size 1b --prompts 512 512 --response_length 53 --batch_size 64 --alternations "${ALTERNATIONS:-3}" --updates 2)
if [[ ${1:-} == --dry_run ]]; then
    shift
    export CUDA_VISIBLE_DEVICES="" ACCELERATE_USE_CPU=true
    device=cpu noise=(--rows 8 --vocabularies 512) MICRO=4
    work=(--size 0.9m --prompts 16 16 --response_length 8 --batch_size 8 --alternations "${ALTERNATIONS:-1}" --updates 1)
fi
scratch=$(mktemp -d) # for models, which nobody wants back
trap 'rm -rf "$scratch"' EXIT
work+=(--precision bf16 --rloo_k 4 --work_dir "$scratch")

where=()
if [[ -n ${WHEELS:-} ]]; then
    where=(--wheels "$(cd "$WHEELS" && pwd)")
elif [[ -n ${ENVIRONMENTS:-} ]]; then
    mkdir -p "$ENVIRONMENTS"
    where=(--environments "$(cd "$ENVIRONMENTS" && pwd)")
fi
IFS=';' read -ra rloo_variants <<<"${RLOO_VARIANTS-plain:--no_share_prompts}"
IFS=';' read -ra ppo_variants <<<"${PPO_VARIANTS-}"

# run PART SECONDS COMMAND...: runs Python, and writes the part's section of the table: what speed.py wrote, or lines of the log
run() {
    local name=$1 limit=$2 code
    shift 2
    rm -rf "${OUT:?}/$name"
    mkdir -p "$OUT/$name"
    echo "== $name, at most $limit seconds"
    timeout "$limit" "$PYTHON" "$@" 2>&1 | tee "$OUT/$name/log.txt"
    code=${PIPESTATUS[0]}
    {
        printf '\n## %s\n\n' "$name"
        cat "$OUT/$name/table.md" 2>/dev/null || grep -E '^\||GPU:' "$OUT/$name/log.txt" | sed '/GPU:/G'
        ((code == 124)) && echo "$name: stopped after $limit seconds; this is what it had measured."
        ((code != 0 && code != 124)) && echo "$name: exit code $code: $(tail -n 1 "$OUT/$name/log.txt")"
    } >"$OUT/$name/section.md"
    failed=$((failed + (code != 0)))
}

# compare PART VERSION VARIANTS...: ours, ours with flags off, and that version of TRL
compare() {
    local name=$1 version=$2
    shift 2
    run "$name" 480 benchmark/speed.py compare --algorithm "$name" --micro_batch_size "$MICRO" --trl_micro_batch_size "$MICRO" \
        "${where[@]}" --against ${where:+$version} --variants "$@" "${work[@]}" --output "$OUT/$name/table"
    [[ ${#where[@]} != 0 ]] || echo "TRL: not measured, neither WHEELS nor ENVIRONMENTS was given." >>"$OUT/$name/section.md"
}

failed=0
[[ $# == 0 ]] && set -- "${ALL[@]}"
for part in "$@"; do
    case $part in
    pages) run pages 300 benchmark/checks/gpu.py pages "$OUT/pages" ;;
    noise) run noise 120 benchmark/checks/gpu.py noise "${noise[@]}" ;;
    decode) run decode 180 benchmark/speed.py decode "${work[@]}" --output "$OUT/decode/table" ;;
    rloo) compare rloo 1.16.0 "${rloo_variants[@]}" ;;
    ppo) compare ppo 0.21.0 "${ppo_variants[@]}" ;;
    *) echo "no part $part: ${ALL[*]}" && exit 2 ;;
    esac
    for name in "${ALL[@]}"; do cat "$OUT/$name/section.md" 2>/dev/null; done >"$OUT/table.md"
done
echo
cat "$OUT/table.md"
exit $((failed > 0))
