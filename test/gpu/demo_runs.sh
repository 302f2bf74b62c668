#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# The demo, lend and borrow on a real GPU: every rung, gate and engine, sizes from 0 bytes to 100 GiB, several workers. Prints
# one row a run and exits non-zero when one failed. Usage: demo_runs.sh PATH-OF-gpuloan [FOLDER-FOR-JSON]
set -u
gpuloan=$1
keep=${2:-$(mktemp -d)}
mkdir -p "$keep"
failed=0

# row NAME ARGUMENTS...: one demo, its times from the report
row() {
  local name=$1; shift
  local file=$keep/$(echo "$name" | tr ' /' '__').json
  "$gpuloan" demo --json --timeout 120 "$@" >"$file" 2>"$file.err"
  local code=$?
  [ $code -eq 0 ] || failed=1
  python3 - "$name" "$code" "$file" <<'PY'
import json, sys
name, code, path = sys.argv[1:]
try:
    d = json.load(open(path))
    for worker in d["workers"][:1]:
        for loan in worker["loans"]:
            us = {step["step"]: step["us"] for step in loan["steps"]}
            print(f"{name:22} rc={code} {loan['title']:6} {loan['rung']:4} {loan['gate']:5} {loan['bytes']:>12} B  "
                  f"READY-DONE {us['DONE'] - us['READY']:11.1f} us  EXPORT-RELEASE {us['RELEASE'] - us['EXPORT']:11.1f} us")
except Exception as error:
    print(f"{name:28} rc={code} {error!r} {open(path + '.err').read().strip()[:300]}")
PY
}

for rung in vmm host; do
  for gate in memop event host; do
    for engine in epoll io_uring; do row "$rung $gate $engine" --size 33554437 --rung $rung --gate $gate --engine $engine; done
  done
done
for size in 0 1 1MiB 1000003 3GiB; do row "file $size" --size $size; done
row "file 3GiB host rung" --size 3GiB --rung host
row "8 workers 3GiB" --size 3GiB --workers 8
row "cpu worker" --size 64MiB --cpu-worker
for size in 64KiB 1GiB 6GiB 100GiB; do row "fill $size" --fill --size $size; done

# lend and borrow in two processes, over a path and a key file
work=$(mktemp -d)
head -c 300000001 /dev/urandom >"$work/a"
"$gpuloan" lend --socket "$work/s" --from "$work/a" --key-file "$work/k" --timeout 60 >"$work/lend.txt" 2>&1 &
"$gpuloan" borrow --socket "$work/s" --to "$work/b" --key-file "$work/k" --timeout 60 >"$work/borrow.txt" 2>&1
code=$?
wait $! || code=1
if [ $code -eq 0 ] && cmp -s "$work/a" "$work/b"; then echo "lend/borrow 300000001 B: identical"; else echo "lend/borrow: FAILED rc=$code"; cat "$work/lend.txt" "$work/borrow.txt"; failed=1; fi
rm -rf "$work"
exit $failed
