# Evaluates a model as the paper does: bash experiments/evaluate.sh MODEL NAME [BENCHMARK ...]
#
#   MODEL      folder or hub name of the model
#   NAME       name of the run; a benchmark's results go to $RESULTS/NAME--BENCHMARK
#   BENCHMARK  which ones; without any, the seven of table 1
#
# Where vLLM samples, one server loads the folder MODEL for all benchmarks and ends with this script. A hub name, or the model
# of a run with a local judge, is loaded by each of them.
#
# A benchmark that is finished is skipped, also with other flags, TEMPLATES or weights; an interrupted one goes on. data/README.md says
# how the files in data/ are made.
# The judges of the first four and of wildbench-g cost money: --budget in JUDGE_FLAGS limits each of them. wildbench-rm asks none:
# a reward model scores the answers.
set -euo pipefail
: "${SEED:=0}" "${RESULTS:=results}"
: "${MAX_TOKENS:=8192}"   # the authors': 8192 with thinking and for all Zero models, 4096 for others
: "${THINK_FORMAT:=auto}" # auto: what the checkpoint says; zero_think or zero_plain for a base model
: "${MODEL_FLAGS:=}"      # how the model runs: --tensor-parallel 4, or --model-url URL (its key: --key-env in JUDGE_FLAGS)
: "${JUDGE:=}"            # in place of the paper's judges, gpt-4o and gpt-4.1: a model's name at JUDGE_URL, or local:FOLDER
: "${JUDGE_URL:=}"        # its endpoint; empty: OPENAI_BASE_URL, else the official one
: "${JUDGE_FLAGS:=}"      # of all: --key-env HOST=NAME --budget DOLLARS --price DOLLARS DOLLARS
: "${REWARD_MODEL:=Skywork/Skywork-Reward-V2-Qwen3-4B}" # of wildbench-rm; not the one that the model was trained with
: "${SHOW:=}"             # 1: prints the commands instead, with the calls of a judge
: "${TEMPLATES:=}"        # folder with the judges' instructions, laid out as eval/reason_benchmarks/data_files of the
                          # authors' repository, whose programs with the tasks' prompts are in the folder above it; empty:
                          # our own wording. Theirs has none for arenahard2: put hard_prompt.txt
                          # (and creative_writing.txt) into its arena_hard_v2/

# start_server: sets url, and leaves it empty if the benchmarks sample by themselves
start_server() {
  mkdir -p "$RESULTS"
  exec 3< <(exec python -m rlmt.vllm --model "$model" --log "$RESULTS/$name--vllm.log" $MODEL_FLAGS)
  trap "kill $! 2> /dev/null && wait $! || true" EXIT # the next row needs its memory
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
  if [ -e "$out/summary.json" ]; then
    echo "$out is complete; delete it to evaluate anew" >&2
    continue
  fi
  # not beside a server that is there, nor a local judge or reward model, which need the memory of the model
  if [ -d "$model" ] && [ -z "${url+x}$SHOW" ] && [[ "$MODEL_FLAGS $JUDGE $*" != *@(--model-url|local:|wildbench-rm)* ]]; then
    start_server
  fi
  wildbench="eval_wildbench.py --mode reward --orders random --temperatures 0.7"
  others="eval_benchmarks.py $benchmark --temperature 0.7"
  asked="--protocol paper ${JUDGE_URL:+--judge-url $JUDGE_URL}"
  gpt4o="--judge ${JUDGE:-gpt-4o} $asked"
  gpt41="--judge ${JUDGE:-gpt-4.1} $asked"
  file="" # of the words of judge or task in $TEMPLATES
  calls="" # of the judge, for the authors' tasks
  case $benchmark in
    wildbench) words="$wildbench --tasks data/wildbench.jsonl $gpt4o" file=wildbench/eval_template.pairwise calls=1024 ;;
    wildbench-g)
      words="$wildbench --tasks data/wildbench_g.jsonl --references gemini-flash $gpt41"
      file=wildbench/eval_template.pairwise calls=1024
      ;;
    wildbench-rm)
      words="eval_wildbench.py --temperatures 0.7 --tasks data/wildbench.jsonl --reward-model $REWARD_MODEL --reward-on response"
      ;;
    alpacaeval2) words="$others --data data/alpacaeval2 $gpt4o" file=alpacaeval2/eval_template.score calls=805 ;;
    arenahard2) words="$others --data data/arena_hard_v2 $gpt41" file=arena_hard_v2/hard_prompt.txt calls=1000 ;;
    creativewriting3)
      words="$others --data data/creative_writing $gpt41"
      file=creativewritingv3/creative_writing_judging_prompt.txt calls=96
      ;;
    popqa) words="$others --data akariasai/PopQA" file=../popqa.py ;;
    ifbench) words="$others --data allenai/IFBench_test" ;;
    ifeval) words="$others --data google/IFEval" ;;
    mmlu_redux) words="$others --data data/mmlu_redux" file=../mmlu_redux_cot.py ;;
    math500) words="$others --data HuggingFaceH4/MATH-500" file=../math_500.py ;;
    zebralogic) words="$others --data data/zebralogic" file=../zebra_logic.py ;;
    *) echo "error: evaluate.sh knows no benchmark $benchmark" >&2 && exit 2 ;;
  esac
  template=()
  if [ -n "$TEMPLATES" ] && [ -n "$file" ]; then
    if [ -e "$TEMPLATES/$file" ]; then
      template=(--template "$TEMPLATES/${file%hard_prompt.txt}")
    else
      echo "no $TEMPLATES/$file: $benchmark has our own wording" >&2
    fi
  fi
  command=(python $words --model "$model" $MODEL_FLAGS $JUDGE_FLAGS "${server[@]}" --top-p 0.95 --max-tokens "$MAX_TOKENS"
    --think-format "$THINK_FORMAT" --seed "$SEED" --out "$out" --resume "${template[@]}")
  if [ -n "$SHOW" ]; then
    [[ $words =~ --judge\ ([^ ]+) ]] || true
    echo "${command[@]@Q}${calls:+ # $calls calls of the judge ${BASH_REMATCH[1]}}"
  else
    "${command[@]}"
  fi
done
