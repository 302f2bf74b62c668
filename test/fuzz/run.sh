#!/bin/sh
# SPDX-License-Identifier: MIT
#
# run.sh BUILD SECONDS [TARGET ...]: each target for so long, from its corpus and from what earlier runs found, and the figures
# of each. Ends with 1 if one failed; README.md says what then.
set -eu
if [ $# -lt 2 ]; then
  echo "usage: $0 BUILD SECONDS [TARGET ...]" >&2
  exit 2
fi
build=$1 seconds=$2
shift 2
here=$(dirname "$0")
[ $# -gt 0 ] || set -- control decode handshake keyring state ledger exporter importer keys numbers options

export ASAN_OPTIONS="detect_leaks=1:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
failed=0
for target in "$@"; do
  found=$build/fuzz/$target
  mkdir -p "$found"
  if ! nice -n 19 "$build/test/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=2500 -timeout=20 -print_final_stats=1 \
    -artifact_prefix="$found-" "$found" "$here/corpus/$target" >"$found.log" 2>&1; then
    failed=1
    grep -E 'not true|ERROR|runtime error|SUMMARY' "$found.log" || true
  fi
  echo "$target: $(grep 'number_of_executed_units' "$found.log" || echo 'no figures') ($found.log)"
done
exit $failed
