#!/usr/bin/env bash
# The whole story on two CPU ranks: make a small Llama, plan, shard, verify, train, merge, generate.
#   bash examples/tour.sh [FOLDER]      FOLDER is demo/ by default, and made anew
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-demo}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Bars belong on a terminal.
[ -t 2 ] || export HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

rm -rf "$out"
mkdir -p "$out"
say python examples/tiny_model.py "$out/llama"
say tpconvert plan "$out/llama" --tp 2 -o "$out/plan.json"
say tpconvert shard "$out/llama" --plan "$out/plan.json" -o "$out/llama-tp2"
say tpconvert inspect "$out/llama-tp2" --check
say tpconvert verify "$out/llama" "$out/llama-tp2"
say tpconvert train "$out/llama-tp2" --config examples/train.yaml --output "$out/run"
python - "$out/run/metrics.jsonl" <<'PY'
import json, pathlib, sys
losses = [json.loads(line)["loss"] for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
print(f"\nThe loss fell from {losses[0]:.2f} to {losses[-1]:.2f}.")
sys.exit(losses[-1] > losses[0] / 2)
PY
say tpconvert merge "$out/run/step-60" -o "$out/trained"
say python examples/generate.py "$out/trained"
