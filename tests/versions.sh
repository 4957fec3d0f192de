#!/usr/bin/env bash
# Runs the tests with one Python and one torch, and prints a line for the table of docs/versions.md:
#
#   tests/versions.sh PYTHON TORCH [TESTS or OPTIONS]...
#
#   tests/versions.sh python3.10 2.10.0                  the two commands of the README
#   tests/versions.sh python3.10 2.10.0 --all            the same with all tests, for a release
#   tests/versions.sh python3.13 2.15.0 tests/equality   those of a folder
#   tests/versions.sh python3.13 2.15.0 names            none: looks for the private names of torch that the package
#                                                        uses, and writes them into tests/house/torch_names.txt
#
# A warning is an error in all tests, as setup.cfg says: so is what this torch deprecates.
#
# It makes an environment in build/versions, or in the folder ENVIRONMENTS, and uses it again the next time. PyPI's torch
# is a build for CUDA, which takes several GB there. To download one without CUDA, and less:
#
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu tests/versions.sh python3.12 2.11.0
#
# With uv on the PATH, environments share the files that they have in common; it reads UV_EXTRA_INDEX_URL instead.
set -euo pipefail
unset PYTHONPATH # the sources of whoever calls this

if [ $# -lt 2 ]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
python=$1 torch=$2
shift 2
cd "$(dirname "$0")/.."

version=$("$python" -c 'import platform; print(platform.python_version())')
environment=${ENVIRONMENTS:-build/versions}/python$version-torch$torch
if [ ! -x "$environment/bin/python" ]; then
  "$python" -m venv "$environment"
fi
if command -v uv >/dev/null; then
  install=(uv pip install --quiet --python "$environment/bin/python")
else
  install=("$environment/bin/python" -m pip install --quiet)
fi
# Without constraints.txt, which pins another torch.
"${install[@]}" "torch==$torch" 'setuptools>=70.1' -e '.[dev]' # older ones make no wheels by themselves

if [ "${1:-}" = names ]; then
  exec "$environment/bin/python" tests/house/torch_names.py
fi

# Prints what the last line of pytest says, without the time that it took.
run_tests() {
  local log=$1 ended=0
  shift
  "$environment/bin/python" -m pytest -n 2 "$@" >"$log" 2>&1 || ended=$?
  grep -E '^(FAILED|ERROR) ' "$log" >&2 || true
  if [ "$ended" -gt 1 ]; then
    tail -n 20 "$log" >&2
  fi
  tail -n 1 "$log" | sed -E 's/^=+ | in [0-9.]+s.*$//g'
  return "$ended"
}

failed=0
on_cpu=$(run_tests "$environment/cpu.log" "$@") || failed=1
simulated=$(run_tests "$environment/simulated.log" "$@" --simulate-devices=5) || failed=1
echo "| $version | $torch | $(date +%F) | ${*:-README} | $on_cpu | $simulated |"
exit "$failed"
