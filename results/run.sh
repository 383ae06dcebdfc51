#!/usr/bin/env bash
# Every experiment of results/README.md, with its exact command.
#
#   results/run.sh                   lists the names
#   results/run.sh NAME [SEED ...]   runs one experiment, or all those of a finding (f1 ... f10); seeds 0 1 2 by default
#   results/run.sh smollm2 0         finding 8's part on a real model: MODEL, a folder or a hub id
#   results/run.sh --flags NAME      prints the flags of an experiment
#   JOBS=1 results/run.sh f1         one run at a time (default: two, one thread each)
#
# A run that is done is skipped; one that was stopped (Ctrl-C, kill) goes on from its last checkpoint when the command
# is given again. Runs live in runs/echo/NAME-seedS; what is quoted of them is copied to results/echo/NAME-seedS. To run
# again what is there, name another folder: "RESULTS=mine results/run.sh collapse" fills mine/ (and runs/mine/).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=${RESULTS:-results/echo}
RUNS=runs/$(basename "$RESULTS")
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}

# The same samples, step sizes and seeds in every experiment of a game; what a name adds is all that differs.
COMMON="--threads 1 --eval_n 256 --eval_temperature 1 --eval_every 0 --save_every 25"
BANDIT="--env bandit --noise shared --iters 50"                             # RAGEN's luck: a group's members share it
SOKOBAN="--env sokoban --max_turns 2 --group_size 8 --minibatch_size 16 --lr 5e-4 --iters 60"
FROZENLAKE="--env frozenlake --max_turns 2 --group_size 8 --minibatch_size 16 --lr 3e-4 --iters 60"
SMOLLM2="--env bandit --max_new_tokens 48 --eval_n 128"

game() {
    case $1 in
        bandit) echo "$BANDIT";; sokoban) echo "$SOKOBAN";; frozenlake) echo "$FROZENLAKE";; smollm2) echo "$SMOLLM2";;
    esac
}

# What an experiment of any game is called, and what it adds to the game's flags. "steps": as many optimizer steps an
# iteration as with all groups (4), by minibatches that are as much smaller as the batch is.
variant() {
    local whole=16; [ "$1" = bandit ] && whole=32
    local on="--iters 15 --groups 4 --group_size 16 --lr 2e-5 --warmup 3 --keep 1 --no_normalize_std"
    case $1-$2 in
        smollm2-sft)      echo "--model $MODEL --algo sft --careful 0 --iters 12 --groups 1 --group_size 16 --lr 3e-5"; return;;
        smollm2-no-think-sft) echo "$(variant smollm2 sft) --no_think"; return;;
        smollm2-rl)       echo "--model $RUNS/smollm2-sft-seedSEED/checkpoint $on"; return;;
        smollm2-no-think) echo "--model $RUNS/smollm2-no-think-sft-seedSEED/checkpoint $on --no_think"; return;;
    esac
    case $2 in
        starpo)           echo "--algo starpo";;                            # 1: KL 0.001, clip 0.2/0.2, all groups
        starpo-s)         echo "--algo starpo-s";;                          # 1: no KL, clip 0.2/0.28, a quarter of the groups
        starpo-s-steps)   echo "--algo starpo-s --minibatch_size $((whole / 4))";;
        starpo-gae)       echo "--algo starpo --estimator gae";;
        starpo-s-gae)     echo "--algo starpo-s --estimator gae";;
        keep50)           echo "--algo starpo --keep 0.5";;                 # 3: the filter alone
        keep25)           echo "--algo starpo --keep 0.25";;
        keep75)           echo "--algo starpo --keep 0.75";;
        keep25-steps)     echo "--algo starpo --keep 0.25 --minibatch_size $((whole / 4))";;
        keep50-steps)     echo "--algo starpo --keep 0.5 --minibatch_size $((whole / 2))";;
        keep75-steps)     echo "--algo starpo --keep 0.75 --minibatch_size $((whole * 3 / 4))";;
        no-kl)            echo "--algo starpo --kl_coef 0";;                # 4: one switch at a time
        clip-high)        echo "--algo starpo --clip_ratio_high 0.28";;
        penalty)          echo "--algo starpo-s --format_penalty 1";;       # 6
        starpo-penalty)   echo "--algo starpo --format_penalty 1";;
        rollback)         echo "--algo starpo --on_collapse rollback --save_every 5";;
        long)             echo "--algo starpo-s --iters 500";;
        long-step)        echo "--algo starpo-s --iters 500 --lr 1e-4";;
        long-rollback)    echo "--algo starpo-s --iters 500 --on_collapse rollback --save_every 5";;
        long-penalty)     echo "--algo starpo-s --iters 500 --format_penalty 1";;
        starpo-s-quarter) echo "--algo starpo-s --keep 0.25";;              # 7: FrozenLake's default on tiny is 0.5
        prompts32)        echo "--algo starpo-s --groups 32 --group_size 2";;        # 7: 64 episodes an iteration
        prompts16)        echo "--algo starpo-s --groups 16 --group_size 4";;
        prompts4)         echo "--algo starpo-s --groups 4 --group_size 16";;
        prompts2)         echo "--algo starpo-s --groups 2 --group_size 32 --keep 0.5";;
        actions2)         echo "--algo starpo-s --max_turns 5 --max_actions_per_turn 2";;        # 7: ten actions in all
        actions10)        echo "--algo starpo-s --max_turns 1 --max_actions_per_turn 10";;
        reuse2)           echo "--algo starpo-s --epochs 2 --iters 30";;     # 7: as many optimizer steps in all
        reuse5)           echo "--algo starpo-s --epochs 5 --iters 12";;
        no-think)         echo "--algo starpo-s --no_think";;               # 8
        sft)              echo "--algo sft --lr 6e-4 --iters 60";;          # 9
        sft-starpo-s)     echo "--algo starpo-s --model $RUNS/$1-sft-seedSEED/checkpoint --max_new_tokens 80 --tokens_per_micro_batch 2048";;
    esac
}

# 5: bandit-NOISE-NORM-KEEP-LOW, as in bandit-independent-std-1-0.15
factorial() {
    local IFS=-; set -- $1
    local norm=normalize_std; [ "$3" = nostd ] && norm=no_normalize_std
    echo "--env bandit --iters 50 --noise $2 --$norm --algo starpo-s --keep $4 --env_args low_reward=$5"
}

flags() {   # NAME
    case $1 in
        bandit-shared-*|bandit-independent-*) factorial "$1";;
        *) echo "$(game "${1%%-*}") $(variant "${1%%-*}" "${1#*-}")";;
    esac
}

each() { local game name; for game in $1; do for name in $2; do echo "$game-$name"; done; done; }

names() {   # of a finding, or the one experiment
    local noise norm keep low number
    case $1 in
        collapse) each bandit "starpo starpo-s";;                           # the pair that README shows
        f1) each "bandit sokoban" "starpo starpo-s starpo-s-steps starpo-gae starpo-s-gae";;
        f2) names f1;;                                                      # read off the same runs
        f3) each "bandit sokoban" "starpo keep75 keep50 keep25 keep75-steps keep50-steps keep25-steps";;
        f4) each "bandit sokoban" "starpo no-kl clip-high";;
        f5) for noise in shared independent; do for norm in std nostd; do for keep in 0.25 1; do for low in 0.15 0.35
            do echo "bandit-$noise-$norm-$keep-$low"; done; done; done; done;;
        f6) each "bandit sokoban" "starpo starpo-s penalty starpo-penalty rollback long long-step long-rollback long-penalty";;
        f7) each frozenlake "starpo starpo-s-quarter"
            each sokoban "prompts32 prompts16 starpo-s prompts4 prompts2 actions2 actions10 reuse2 reuse5";;
        f8) each "bandit sokoban" "starpo-s no-think";;
        f9) each sokoban "starpo-s sft sft-starpo-s";;
        f10) echo sokoban-starpo-s;;                                        # its checkpoints, in other games
        smollm2) each smollm2 "sft rl no-think-sft no-think";;              # 8, and then in games with other names
        all) for number in f1 f3 f4 f5 f6 f7 f8 f9 smollm2; do names $number; done | awk '!seen[$0]++';;
        *) names all | grep -x -e "$1" || { echo "results/run.sh: no experiment is called $1" >&2; exit 2; };;
    esac
}

# Train NAME with SEED until it is done, from its last checkpoint if there is one. Two processes never share a folder.
trained() {
    local out="$RUNS/$1-seed$2" holder failed=0 before
    before=$(flags "$1" | sed -n "s#.*--model $RUNS/\(.*\)-seedSEED/checkpoint.*#\1#p")
    if [ -n "$before" ]; then trained "$before" "$2"; fi
    mkdir -p "$RUNS"
    while ! (set -C; echo $$ > "$out.lock") 2> /dev/null; do
        holder=$(cat "$out.lock" 2> /dev/null || true)
        if [ -n "$holder" ] && kill -0 "$holder" 2> /dev/null; then sleep 5; else rm -f "$out.lock"; fi
    done
    if [ -f "$out/summary.json" ]; then
        :
    elif [ -f "$out/checkpoint/trainer.json" ] || [ -f "$out/checkpoint.old/trainer.json" ]; then
        "$PYTHON" train.py --resume "$out" >> "$out.log" 2>&1 || failed=1
    else
        rm -rf "$out"
        "$PYTHON" train.py $COMMON $(flags "$1" | sed "s/SEED/$2/") --seed "$2" --out "$out" > "$out.log" 2>&1 || failed=1
    fi
    rm -f "$out.lock"
    if [ $failed = 1 ]; then echo "$1-seed$2 stopped, see $out.log: $(tail -1 "$out.log")" >&2; exit 1; fi
}

one() {     # NAME SEED: train it, and keep what is quoted
    local out="$RUNS/$1-seed$2" kept="$RESULTS/$1-seed$2"
    if [ -f "$kept/summary.json" ]; then return; fi
    trained "$1" "$2"
    mkdir -p "$kept"
    cp "$out/config.json" "$out/metrics.jsonl" "$kept"
    cp "$out/summary.json" "$kept"                                          # last: it says that the rest is there
    echo "$1-seed$2: done"
}

elsewhere() {       # NAME SEED GAMES FILE: the trained model in other games
    if [ -s "$RESULTS/$4" ]; then return; fi
    trained "$1" "$2"
    mkdir -p "$RESULTS"
    "$PYTHON" train.py --eval_only "$RUNS/$1-seed$2" --eval_envs "$3" | grep success > "$RESULTS/$4"
}

f10() {             # SEED
    local games=sokoban,sokoban-newvocab,sokoban-large,frozenlake
    elsewhere sokoban-starpo-s "$1" $games "elsewhere-seed$1.txt"
    [ -s "$RESULTS/elsewhere-start.txt" ] || "$PYTHON" train.py --eval_only tiny --env sokoban --max_turns 2 \
        --eval_temperature 1 --threads 1 --eval_n 256 --eval_envs $games | grep success > "$RESULTS/elsewhere-start.txt"
}

smollm2() {         # SEED
    local name
    for name in $(names smollm2); do
        elsewhere $name "$1" bandit,bandit-test,bandit-rev "$name-elsewhere-seed$1.txt"
        one $name "$1"
    done
}

if [ $# -eq 0 ]; then
    for finding in collapse f1 f2 f3 f4 f5 f6 f7 f8 f9 f10 smollm2; do echo "$finding: $(names $finding | xargs)"; done
elif [ "$1" = --one ]; then
    one "$2" "$3"
elif [ "$1" = --flags ]; then
    for name in $(names "${2:-}"); do echo "$COMMON $(flags "$name")"; done
else
    name=$1; shift
    names "$name" > /dev/null
    jobs=$(for seed in ${*:-0 1 2}; do names "$name" | sed "s/$/ $seed/"; done)
    if [ "$name" = f10 ] || [ "$name" = smollm2 ]; then
        for seed in ${*:-0 1 2}; do "$name" "$seed"; done
    else
        exec xargs -n 2 -P "${JOBS:-2}" results/run.sh --one <<< "$jobs"
    fi
fi
