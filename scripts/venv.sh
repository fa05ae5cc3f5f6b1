#!/bin/sh
# Make .venv from the lock file. PyTorch: the CPU wheel where one lies in ../shared/wheels or a folder of PIP_FIND_LINKS,
# else PyPI's build with the CUDA libraries it needs (several GB).
set -eu
cd "$(dirname "$0")/.."
venv="${VENV:-.venv}"
python="${PYTHON:-python3}"

links=""
cpu_wheel=""
for folder in ../shared/wheels ${PIP_FIND_LINKS:-}; do
  [ -d "$folder" ] || continue
  links="$links $(cd "$folder" && pwd)"
  for wheel in "$folder"/torch-2.13.0+cpu-*.whl; do [ -e "$wheel" ] && cpu_wheel="$wheel"; done
done
tag=$("$python" -c 'import sys, platform; print(f"{platform.system()}-{platform.machine()}-{sys.version_info[0]}{sys.version_info[1]}")')
"$python" -c 'import sys; sys.exit("Poolwright needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'

set -- -r locks/dev.txt
case "$tag" in
Linux-x86_64-311) [ -n "$cpu_wheel" ] || set -- "$@" -r locks/cuda.txt ;;
Linux-*) set -- "$@" -r locks/cuda.txt ;;
esac
echo "Making $venv: $([ -n "$cpu_wheel" ] && echo "CPU PyTorch from ${cpu_wheel##*/}" || echo "PyTorch from the package index")"
"$python" -m venv --clear "$venv"
PIP_FIND_LINKS="$links" "$venv/bin/pip" install --disable-pip-version-check --no-input --progress-bar "${PIP_PROGRESS_BAR:-on}" --no-deps --require-hashes "$@"
"$venv/bin/pip" install --disable-pip-version-check --no-input --quiet --no-deps --no-index --no-build-isolation -e .
touch "$venv/.ready"
