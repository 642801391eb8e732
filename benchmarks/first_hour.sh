#!/bin/sh
# From a wheel at hand to the first AUC, in an empty environment that has
# torch; prints the seconds of each step.
#
# usage: benchmarks/first_hour.sh WHEEL [PYTHON]
#
# PYTHON (default: python3) has torch and what else the wheel needs: the new
# environment sees its packages, as a machine of a team would have them.
set -eu
wheel=$(realpath "$1")
python=${2:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

now() { date +%s.%N; }
step() { # step NAME COMMAND...
    name=$1
    shift
    begin=$(now)
    "$@" >"$place/log" 2>&1 || { cat "$place/log" >&2; exit 1; }
    echo "$name $begin $(now)" | awk '{printf "%-12s %6.1f s\n", $1, $3 - $2}'
}

start=$(now)
step venv "$python" -m venv "$place/venv"
packages=$("$python" -c 'import sysconfig as s; print(s.get_path("purelib"))')
site=$("$place/venv/bin/python" -c \
    'import sysconfig as s; print(s.get_path("purelib"))')
echo "$packages" >"$site/packages.pth"
cd "$place"
unset PYTHONPATH
there() { env PATH="$place/venv/bin" "$@"; } # no compiler, no make
step install there pip install --no-deps --no-index "$wheel"
step doctor there persia doctor
step train there persia train --samples 500000
cat "$place/log"
echo "all $start $(now)" | awk '{printf "%-12s %6.1f s\n", $1, $3 - $2}'
