#!/bin/bash
# Builds the wheel, installs it into a clean environment, and runs the package's tests from a copy of them: nothing of
# the source tree is in reach.
#
#   tests/python/from_wheel.sh PYTHON [pytest arguments]
#
# PYTHON has the build and test dependencies (examples/requirements.txt). The clean environment reads them through a
# .pth file, PyTorch being too large to install twice; its own site-packages, with the wheel, come first.
# With a Python 3.12 (python3.12, pyenv's or LMHEAD_PYTHON312) an abi3 wheel is built and tested on NumPy arrays as well.
set -euo pipefail
python=$(realpath -s "$1")
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$root/build/wheel
rm -rf "$work" && mkdir -p "$work/tests"
cp "$root"/tests/python/*.py "$work/tests"
# Tests of the command, the examples and the documents need the tree; their names go to build/wheel/tree_tests.
grep -lE '^import command|parents\[2\]|parent\.parent' "$root"/tests/python/test_*.py > "$work/tree_tests"
while read -r test; do rm "$work/tests/$(basename "$test")"; done < "$work/tree_tests"
export LMHEAD_HOSTS_DIR=${LMHEAD_HOSTS_DIR:-$root/build/hosts}

quiet="--quiet --disable-pip-version-check"
# The options of the build that was tested, so that a compiler cache knows the library already.
define=(--config-settings cmake.define.LMHEAD_WERROR=ON)
[ -z "${LMHEAD_CUDA_ARCHITECTURES:-}" ] || define+=(--config-settings "cmake.define.LMHEAD_CUDA_ARCHITECTURES=$LMHEAD_CUDA_ARCHITECTURES")
"$python" -m pip wheel $quiet --no-deps --no-build-isolation -w "$work/wheels" "$root" "${define[@]}"
"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --python "$work/venv/bin/python" install $quiet --no-deps "$work"/wheels/lmhead-*.whl
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
cd "$work/tests"
"$work/venv/bin/python" -c "
import lmhead, pathlib
assert pathlib.Path(lmhead.__file__).is_relative_to('$site'), lmhead.__file__
print('wheel', lmhead.__version__, [b['name'] for b in lmhead.info()['backends'] if b['available']])"
"$work/venv/bin/python" -m pytest -q -rs "$@" .

for other in "${LMHEAD_PYTHON312:-python3.12}" "$(pyenv prefix 3.12 2> /dev/null || true)/bin/python" ''; do
  if [ -z "$other" ]; then
    echo 'from_wheel: no Python 3.12 here, its wheel is not built'
    exit 0
  fi
  "$other" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && break
done
"$other" -m venv "$work/venv312"
"$work/venv312/bin/pip" wheel $quiet --no-deps -w "$work/wheels312" "$root" --config-settings cmake.define.LMHEAD_CUDA=OFF --config-settings cmake.define.LMHEAD_WERROR=ON
"$work/venv312/bin/pip" install $quiet numpy pytest "$work"/wheels312/lmhead-*-abi3-*.whl
"$work/venv312/bin/python" -m pytest -q -rs test_numpy.py
