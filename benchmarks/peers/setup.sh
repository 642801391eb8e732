#!/bin/sh
# Makes .venv-peers: fbgemm and torchrec, beside the torch of .venv (the same
# torch for everybody, and it is not downloaded twice).  Nothing that is
# installed here can change .venv.  A second call does nothing.
# usage: benchmarks/peers/setup.sh [PYTHON of .venv]
set -eu
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
peers=.venv-peers
list=benchmarks/peers/requirements.txt
if [ -f "$peers/.stamp" ] && [ "$peers/.stamp" -nt "$list" ]; then
    exit 0
fi
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -m venv "$peers"
"$python" -c "$site" > "$("$peers/bin/python" -c "$site")/beside.pth"
"$peers/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-deps -r "$list"
"$peers/bin/python" -c 'import fbgemm_gpu, torchrec' 2> "$peers/log" || {
    cat "$peers/log"; exit 1; }
touch "$peers/.stamp"
