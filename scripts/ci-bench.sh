#!/usr/bin/env bash
# Verifies and times the forward pass, compares both runs with a committed baseline, and fails when something got worse.
# .github/workflows/bench.yml runs this file; so can any other CI, or you. docs/ci.md says how.
#
#   scripts/ci-bench.sh               on a Hopper GPU, with flashqla and its extra `report` installed
#   DEVICE=cpu scripts/ci-bench.sh    a rehearsal on any machine
#
# Settings, from the environment:
#   DEVICE            cuda, or cpu; never chosen by itself, so that a runner that lost its GPU fails (cuda)
#   BASELINE          folder with the runs to compare with, verify.json and bench-fwd.json (bench-baseline)
#   REQUIRE_BASELINE  not empty: a missing baseline is an error, and not a first run
#   OUT               folder for results (out/ci)
#   VERIFY_ARGS, BENCH_ARGS, COMPARE_ARGS
#                     more arguments of `flashqla verify`, `bench fwd` and `compare`, separated by spaces or ends of lines
#
# Leaves in OUT: verify.json and bench-fwd.json, report.html, summary.md for a job's page and comment.md for a pull
# request. Exits with the first code of flashqla that is not 0: 1 is a wrong result, a failed row or a regression.
set -euo pipefail
set -f # arguments are split at spaces and ends of lines, and no * in them becomes a file name

device=${DEVICE:-cuda} baseline=${BASELINE:-bench-baseline} out=${OUT:-out/ci}
verify_args=(${VERIFY_ARGS:-})
bench_args=(${BENCH_ARGS:-})
compare_args=(${COMPARE_ARGS:-})
comment_bytes=60000 # GitHub refuses comments of more than 65536 characters

mkdir -p "$out"
for file in verify.json bench-fwd.json report.html summary.md comment.md; do
  rm -f "$out/$file" # a runner may keep the folder, and a run that fails must not leave the results of another one
done

code=0
attempt() { # the first code that is not 0 becomes that of this script; Ctrl-C ends it
  local status=0
  "$@" || status=$?
  ((code)) || code=$status
  ((status != 130)) || exit 130
}

attempt flashqla verify --device "$device" --json "$out/verify.json" "${verify_args[@]}"
attempt flashqla bench fwd --device "$device" --json "$out/bench-fwd.json" "${bench_args[@]}"

compare() { # one kind of run with its baseline, as Markdown; an error is part of the page
  local old=$baseline/$1 new=$out/$1 status=0 first=()
  if [[ ! -f $new ]]; then
    printf '## %s: no result\n\nThe log of the job says why.\n\n' "$1"
    return 0
  fi
  [[ -f $old || -n ${REQUIRE_BASELINE:-} ]] || first=(--allow-missing-baseline)
  flashqla compare "$old" "$new" --format markdown "${first[@]}" "${compare_args[@]}" 2>"$out/compare.err" || status=$?
  if [[ -s $out/compare.err ]]; then
    cat "$out/compare.err" >&2
    printf '\n```\n%s\n```\n' "$(<"$out/compare.err")"
  fi
  rm "$out/compare.err"
  echo
  return "$status"
}

runs=()
for file in verify.json bench-fwd.json; do
  attempt compare "$file" >>"$out/comment.md"
  [[ ! -f $out/$file ]] || runs+=("$out/$file")
done
if ((${#runs[@]})); then
  attempt flashqla report "${runs[@]}" --out "$out/report.html"
  attempt flashqla report "${runs[@]}" --format markdown --out "$out/summary.md"
fi

case $code in
0)
  outcome='Nothing got worse.'
  if grep -qE '^[0-9]+ of [0-9]+ rows could be judged' "$out/comment.md"; then
    outcome='Nothing that could be judged got worse; some rows could not be judged, see below.'
  fi
  ;;
1) outcome='**A wrong result, a failed row or a regression.**' ;;
4) outcome='**Not judged: exit code 4.** There was nothing to run or to compare, or no row could be judged; see below.' ;;
*) outcome="**Not judged: exit code $code.** The log of the job says why." ;;
esac
if ((${#runs[@]} && ! code)) && [[ ! -f $baseline/verify.json || ! -f $baseline/bench-fwd.json ]]; then
  outcome+=" There is no whole baseline yet: commit verify.json and bench-fwd.json of this run as $baseline/."
fi
page=$(
  printf '# flashqla: %s\n\n%s\n\n' "$device" "$outcome"
  cat "$out/comment.md"
)
results=
[[ ! -f $out/summary.md ]] || results=$(<"$out/summary.md")
printf '%s\n\n%s\n' "$page" "$results" >"$out/summary.md"
if ((${#page} > comment_bytes)); then
  page=$(head -c "$comment_bytes" <<<"$page" | sed '$d')
  page+=$'\n\nCut here, because a comment cannot be longer: summary.md has all rows.'
fi
printf '%s\n' "$page" >"$out/comment.md"
[[ -z ${GITHUB_STEP_SUMMARY:-} ]] || cat "$out/summary.md" >>"$GITHUB_STEP_SUMMARY"
printf 'results are in %s: %s\n' "$out" "${outcome//\*\*/}" >&2
exit "$code"
