# What the lines of experiments/*.sh mean; each of these files sources it after its own settings.
#
#   row TABLE/NAME [from NAME] [needs NAME] ... [SCRIPT FLAGS]    trains with train_SCRIPT.py, if one is named, then evaluates
#   row TABLE/NAME as TABLE/NAME                                  has the numbers of that row of another table: nothing is run
#   stage NAME [from NAME] [needs NAME] ... SCRIPT FLAGS          trains alone
#   prepare NAME [needs NAME] ... [makes FILE] COMMAND            makes data or a small model for all seeds, unless FILE is there
#
# A run goes to $RESULTS/NAME-s$SEED. `from NAME` starts it from that run's model, and `needs NAME` wants another line first.
# A row without SCRIPT evaluates the model that the line of its name trains elsewhere, or $MODEL: a folder or hub name.
# Variables before a line hold for it alone: MAX_TOKENS and THINK_FORMAT of its evaluation, MODEL, MODEL_FLAGS, EVALUATE, LAUNCH.
# Without MAX_TOKENS an answer has 128 tokens with EVALUATE, else the authors' limit: 8192 with thinking and for all Zero models,
# 4096 for other rlhf and sft-plain, and what is trained with --think-format plain.
#
# An interrupted line goes on with the same command. BLOCK=NAME runs one stage, preparation or training of a row alone, and
# BLOCK=TABLE/NAME the evaluation of a row. SHOW=1 prints the commands instead, with what they cost; LIST=1 prints a line
# KIND|BLOCK|FOLDER|EVALUATIONS|NEEDS for each block, whose FOLDER is that of its runs in results/.
: "${SEED:=0}" "${RESULTS:=results}"
: "${LAUNCH:=accelerate launch --config_file accelerate/8gpu_fsdp2.yaml}"
# -as-released: presets with the values of the paper's released code, where they differ from the paper's
: "${AS_RELEASED:=}"
# --gold judge:MODEL --gold-prompts FILE: held-out prompts, measured at every checkpoint of grpo, ppo and dpo
: "${GOLD_FLAGS:=}"
# evaluate.sh says what these hold
: "${JUDGE:=}" "${JUDGE_URL:=}" "${JUDGE_FLAGS:=}" "${TEMPLATES:=}"
# of a row: what evaluate.sh measures, and a command in place of evaluate.sh
: "${BENCHMARKS=wildbench alpacaeval2 arenahard2 creativewriting3 popqa ifbench mmlu_redux}" "${EVALUATE:=}"
# of a row that trains nothing: a folder or hub name
MODEL=
export SEED RESULTS JUDGE JUDGE_URL JUDGE_FLAGS TEMPLATES
trap 'exit 143' TERM # after the command that runs: a training run first writes a checkpoint

run() {
  if [ -n "${SHOW:-}" ]; then
    echo "${@@Q}${cost:+ # $cost}"
  else
    "$@"
  fi
}

# read_line WORDS: sets needs, start, and words, the command
read_line() {
  needs=() start=()
  while [[ "${1:-}" =~ ^(from|needs|as)$ ]]; do
    needs+=("$2")
    if [ "$1" = from ]; then
      start=(--model "$RESULTS/$2-s$SEED/model")
    fi
    shift 2
  done
  words=("$@")
}

# wanted KIND BLOCK EVALUATIONS: whether it is to be run; in a listing, prints it
wanted() {
  local folder=${RESULTS#results}
  if [ -n "${LIST:-}" ]; then
    echo "$1|$2|${folder#/}|$3|${needs[*]}"
  fi
  [ -z "${LIST:-}" ] && [ "${BLOCK:-$2}" = "$2" ]
}

row() {
  local name=${1##*/} evaluations=${EVALUATE:+gold}
  local model=${MODEL:-$RESULTS/$name-s$SEED/model}
  read_line "${@:2}"
  if [ ${#words[@]} -gt 0 ]; then
    stage "$name" "${@:2}"
    needs=("$name")
    model=$RESULTS/$name-s$SEED/model
  fi
  evaluations=${evaluations:-$BENCHMARKS}
  if wanted row "$1" "$evaluations" && [[ "${2:-}" != as && -n $evaluations ]]; then
    evaluate "$model" "$name-s$SEED"
  fi
}

stage() {
  local script gold="" hours="" cost=""
  read_line "${@:2}"
  if wanted stage "$1" ""; then
    script=train_${words[0]}.py
    case ${words[0]} in # hours of an 8B model, by the paper's README; DPO's without its sampling
      sft) script=train_sft_warmstart.py hours=20 ;;
      grpo | ppo) gold=$GOLD_FLAGS hours=62 ;;
      dpo) gold=$GOLD_FLAGS hours=8 ;;
    esac
    if [[ $LAUNCH == accelerate* ]]; then
      cost=${hours:+"$hours H100-hours, as the paper's README has them for 8B"}
    fi
    run $LAUNCH "$script" "${words[@]:1}" "${start[@]}" $gold --seed "$SEED" --out "$RESULTS/$1-s$SEED" --resume
  fi
}

prepare() {
  read_line "${@:2}"
  if wanted prepare "$1" ""; then
    set -- "${words[@]}"
    if [ "$1" = makes ]; then
      if [ -e "$2" ]; then
        return
      fi
      shift 2
    fi
    run "$@"
  fi
}

evaluate() { # MODEL NAME
  if [ -n "$EVALUATE" ]; then
    run $EVALUATE --model "$1" --max-tokens "${MAX_TOKENS:-128}" ${THINK_FORMAT:+--think-format "$THINK_FORMAT"} \
      --seed "$SEED" --out "$RESULTS/$2--gold" --resume
    return
  fi
  local limit=8192 THINK_FORMAT=${THINK_FORMAT:-} # tokens
  case $2 in
    *-zero*) ;; # also without thinking
    *-rlhf* | *-sft-plain*) limit=4096 ;;
    *) [[ "${words[*]}" != *"--think-format plain"* ]] || limit=4096 ;;
  esac
  if [[ "$2" == *-as-released-s* ]]; then
    set -- "checkpoints/${2%-as-released-s*}" "$2"
    case $1 in
      *-rlhf-zero*) THINK_FORMAT=zero_plain ;;
      *-rlmt-zero*) THINK_FORMAT=zero_think ;;
      *-rlhf* | *-sft-plain) THINK_FORMAT=plain ;;
      *) THINK_FORMAT=think ;;
    esac
  fi
  run env MAX_TOKENS="${MAX_TOKENS:-$limit}" THINK_FORMAT="${THINK_FORMAT:-auto}" MODEL_FLAGS="${MODEL_FLAGS:-}" \
    bash experiments/evaluate.sh "$1" "$2" $BENCHMARKS
}
