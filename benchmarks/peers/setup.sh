#!/bin/sh
# Makes .venv-peers: fbgemm and torchrec beside the torch that we use.
# A second call does nothing.   usage: benchmarks/peers/setup.sh [python]
set -eu
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
stamp=.venv-peers/.stamp
if [ -f "$stamp" ] && [ "$stamp" -nt benchmarks/peers/requirements.txt ]; then
    exit 0
fi
"$python" -m venv .venv-peers
pip=".venv-peers/bin/python -m pip install --quiet --disable-pip-version-check"
torch=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
$pip "torch==$torch" numpy
$pip --no-deps -r benchmarks/peers/requirements.txt
touch "$stamp"
