#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# What has to be seen on real GPUs, in one run: one lane for each GPU takes one step after the other, so that no two of them count the
# memory of one device. Each step's output is OUT/NAME.log; OUT/table has a row for each, and is printed last. Exits non-zero when a
# step failed.
#
# Usage: acceptance.sh BUILD OUT [STEP...]; BUILD is the build's folder. A STEP stands for the step of that name and for those whose names
# begin with it and a dash, `contract` for all cells of the contract suite: they run in the order given. Without any all run but kill,
# frameworks, results and peers. --list names them.
#
# The steps in Python need PyTorch, frameworks CuPy and JAX as well, peers cuda.core.
set -u
build=$(cd "$1" && pwd) out=$2
shift 2
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
library=$build/lib/libgpuloan.so.0 gpuloan=$build/tools/gpuloan contract=$build/test/contract answers=$build/test/sim/sim_answers
names=() lines=()

# step NAME SECONDS COMMAND...
step() {
  names+=("$1")
  lines+=("$(printf '%q ' "$@")")
}

for rung in vmm host ipc pool; do
  for gate in memop event host; do
    for engine in epoll io_uring; do
      step "contract-$rung-$gate-$engine" 120 "$contract/contract_test" --driver real --rung $rung --gate $gate --engine $engine
    done
  done
done
step foreign 200 "$contract/foreign_test" --driver real
step rungs 200 "$contract/rungs_test" --driver real
step canary 60 "$gpuloan" canary --driver real
step canary-pool 60 "$gpuloan" canary --driver real --experimental-pool
step probe 30 "$gpuloan" probe --driver real
step probe-limit 120 env XDG_CACHE_HOME="$out/cache" "$gpuloan" probe --driver real --import-limit
step answers 120 "$answers" libcuda.so.1 --compare "$here/../sim/answers/h200-580.159.04.txt" /dev/null
step answers-stranded 60 "$answers" libcuda.so.1 stranded
for gate in memop event host; do
  step "unpinned-$gate" 120 "$contract/contract_test" --driver "$contract/libgpuloan-limited-pinning.so" --rung host --gate $gate --engine epoll
done
step demo 300 "$here/demo_runs.sh" "$gpuloan" "$out/demo"
for allocator in NATIVE EXPANDABLE MEMPOOL ASYNC SWAP; do
  step "torch-$allocator" 120 python3 "$here/torch_tensors.py" "$library" "$gpuloan" $allocator
done
step bench 200 "$gpuloan" bench --driver real --plot "$out/bench.svg"
step bench-caller 200 "$gpuloan" bench --driver real --loop caller --case turns --case loans --case compute --case pool
step bench-sleep 200 "$gpuloan" bench --driver real --loop caller --wait sleep --case loans
step two 200 python3 "$here/two_gpus.py" "$library" "$gpuloan" "$contract/device_test" real # once the lanes are done
usual=("${names[@]}")
for rung in vmm host ipc pool; do step "kill-$rung" 400 "$contract/kill_test" --driver real --rung $rung --all --table; done
for allocator in default torch_pool expandable swap; do
  step "frameworks-$allocator" 320 python3 "$here/frameworks.py" "$library" "$out/worker_c" --allocator $allocator
done
step results 300 python3 "$here/results.py" "$library"
step peers 500 python3 "$here/peers.py" "$library" --gpuloan "$gpuloan" --svg "$out/peers.svg"

if [ "${1:-}" = --list ]; then printf '%s\n' "${names[@]}"; exit; fi
[ $# -gt 0 ] || set -- "${usual[@]}"
queue=$out/queue table=$out/table
: >"$queue"; : >"$table"
two=
for wish in "$@"; do
  found=no
  for i in "${!names[@]}"; do
    case ${names[i]} in "$wish" | "$wish"-*) found=yes ;; *) continue ;; esac
    case ${names[i]} in
      two) two=${lines[i]} ;;
      frameworks-*)
        [ -e "$out/worker_c" ] ||
          cc -I "$here/../../include" "$here/../../docs/examples/worker.c" "$library" -Wl,-rpath,"$build/lib" -o "$out/worker_c" || exit ;;&
      *) printf '%s\n' "${lines[i]}" >>"$queue" ;;
    esac
  done
  [ $found = yes ] || { echo "acceptance.sh: no step '$wish'; --list names them" >&2; exit 2; }
done

run_step() {
  local name=$1 seconds=$2 begin=$SECONDS code
  shift 2
  timeout --kill-after=5 "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null
  code=$?
  printf '%-28s rc=%-3s %4d s  %s\n' "$name" $code $((SECONDS - begin)) "$(grep -v '^[[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c 1-110)" >>"$table"
}

# The next line of the queue, which no other lane gets.
next_step() {
  { flock 9; line=$(head -n 1 "$queue"); sed -i 1d "$queue"; } 9>"$out/lock"
  [ -n "$line" ]
}

lane() {
  export CUDA_VISIBLE_DEVICES=$1
  local line words
  while next_step; do
    eval "words=($line)"
    run_step "${words[@]}"
  done
}

mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
[ ${#gpus[@]} -gt 0 ] || { echo 'acceptance.sh: nvidia-smi names no GPU' >&2; exit 2; }
for gpu in "${gpus[@]}"; do lane "$gpu" & done
wait
if [ -n "$two" ]; then
  if [ ${#gpus[@]} -gt 1 ]; then eval "words=($two)" && run_step "${words[@]}"; else echo 'two                          not run: one GPU' >>"$table"; fi
fi
cat "$table"
! grep -qv ' rc=0 ' "$table" || exit 1
