# Evaluates a model as the paper does: bash experiments/evaluate.sh MODEL NAME [BENCHMARK ...]
#
#   MODEL      folder or hub name of the model
#   NAME       name of the run; a benchmark's results go to $RESULTS/NAME--BENCHMARK
#   BENCHMARK  which ones; without any, the seven of table 1
#
# Where vLLM samples, one server loads the folder MODEL for all benchmarks and ends with this script; a hub name is loaded by
# each of them.
#
# A benchmark that is finished is skipped, also with other flags or TEMPLATES; an interrupted one goes on. data/README.md says
# how the files in data/ are made.
# The judges of the first four and of wildbench-g cost money: --budget in JUDGE_FLAGS limits each of them.
set -euo pipefail
: "${SEED:=0}" "${RESULTS:=results}"
: "${MAX_TOKENS:=8192}"   # the authors': 8192 with thinking and for all Zero models, 4096 for others
: "${THINK_FORMAT:=auto}" # auto: what the checkpoint says; zero_think or zero_plain for a base model
: "${MODEL_FLAGS:=}"      # how the model runs: --tensor-parallel 4, or --model-url URL (its key: --key-env in JUDGE_FLAGS)
: "${JUDGE_FLAGS:=}"      # --judge-url URL --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${TEMPLATES:=}"        # folder with the judges' instructions, laid out as eval/reason_benchmarks/data_files of the
                          # authors' repository; empty: our own wording. Theirs has none for arenahard2: put hard_prompt.txt
                          # (and creative_writing.txt) into its arena_hard_v2/

# instructions FILE: --template for the files that $TEMPLATES has; without it the judge reads our own wording
instructions() {
  if [ -n "$TEMPLATES" ] && [ -e "$TEMPLATES/$1" ]; then
    template=(--template "$TEMPLATES/${1%hard_prompt.txt}")
  elif [ -n "$TEMPLATES" ]; then
    echo "no $TEMPLATES/$1: $benchmark is judged in our own wording"
  fi
}

# start_server: sets url, and leaves it empty if the benchmarks sample by themselves
start_server() {
  mkdir -p "$RESULTS"
  exec 3< <(exec python -m rlmt.vllm --model "$model" --log "$RESULTS/$name--vllm.log" $MODEL_FLAGS)
  trap "kill $! 2> /dev/null || true" EXIT
  read -r url <&3
  if [ -n "$url" ]; then
    server=(--model-url "$url")
  fi
}

model=$1 name=$2 server=()
shift 2
if [ $# -eq 0 ]; then
  set -- wildbench alpacaeval2 arenahard2 creativewriting3 popqa ifbench mmlu_redux
fi

for benchmark in "$@"; do
  out=$RESULTS/$name--$benchmark
  # with newer weights it is not skipped, and the script says that they have changed
  newer=$(find -L "$model" -name '*.safetensors' -newer "$out/summary.json" 2> /dev/null || true)
  if [ -e "$out/summary.json" ] && [ -z "$newer" ]; then
    echo "$out is complete; delete it to evaluate anew"
    continue
  fi
  if [ -d "$model" ] && [ -z "${url+x}" ]; then
    start_server
  fi
  run=(--model "$model" $MODEL_FLAGS "${server[@]}" --top-p 0.95 --max-tokens "$MAX_TOKENS" --think-format "$THINK_FORMAT" --seed "$SEED"
    --out "$out" --resume)
  wildbench=(eval_wildbench.py --mode reward --orders random --temperatures 0.7)
  others=(eval_benchmarks.py "$benchmark" --temperature 0.7)
  gpt4o="--judge gpt-4o --protocol paper $JUDGE_FLAGS"
  gpt41="--judge gpt-4.1 --protocol paper $JUDGE_FLAGS"

  template=()
  case $benchmark in
    wildbench | wildbench-g) instructions wildbench/eval_template.pairwise ;;
    alpacaeval2) instructions alpacaeval2/eval_template.score ;;
    arenahard2) instructions arena_hard_v2/hard_prompt.txt ;;
    creativewriting3) instructions creativewritingv3/creative_writing_judging_prompt.txt ;;
  esac
  run+=("${template[@]}")

  case $benchmark in
    wildbench) python "${wildbench[@]}" --tasks data/wildbench.jsonl $gpt4o "${run[@]}" ;;
    wildbench-g) python "${wildbench[@]}" --tasks data/wildbench_g.jsonl --references gemini-flash $gpt41 "${run[@]}" ;;
    alpacaeval2) python "${others[@]}" --data data/alpacaeval2 $gpt4o "${run[@]}" ;;
    arenahard2) python "${others[@]}" --data data/arena_hard_v2 $gpt41 "${run[@]}" ;;
    creativewriting3) python "${others[@]}" --data data/creative_writing $gpt41 "${run[@]}" ;;
    popqa) python "${others[@]}" --data akariasai/PopQA "${run[@]}" ;;
    ifbench) python "${others[@]}" --data allenai/IFBench_test "${run[@]}" ;;
    ifeval) python "${others[@]}" --data google/IFEval "${run[@]}" ;;
    mmlu_redux) python "${others[@]}" --data data/mmlu_redux "${run[@]}" ;;
    math500) python "${others[@]}" --data HuggingFaceH4/MATH-500 "${run[@]}" ;;
    zebralogic) python "${others[@]}" --data data/zebralogic "${run[@]}" ;;
    *) echo "error: evaluate.sh knows no benchmark $benchmark" >&2 && exit 2 ;;
  esac
done
