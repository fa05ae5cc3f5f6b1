#!/bin/sh
# Make .venv from the lock file. PyTorch: the CPU wheel where one lies in ../shared/wheels or a folder of PIP_FIND_LINKS,
# else PyPI's build with the CUDA libraries it needs (several GB). One line a step; what pip has to complain of in full.
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
pip() { PIP_FIND_LINKS="$links" "$venv/bin/pip" --quiet --disable-pip-version-check --no-input "$@"; }
install() { pip install --no-deps --require-hashes "$@"; }
packages=$(grep -c '^[a-z0-9].*==' locks/dev.txt)
echo "Making $venv, about 5 minutes where the network is fast"
echo "  1 of 3: an empty environment of $("$python" --version)"
"$python" -m venv --clear "$venv"
echo "  2 of 3: $packages packages, with $([ -n "$cpu_wheel" ] && echo "CPU PyTorch from ${cpu_wheel##*/}" || echo "PyTorch for CUDA, several GB"); nothing is printed meanwhile"
if [ -n "$cpu_wheel" ]; then
  # Given all hashes of the lock, pip takes the index's larger build; given only the CPU build's, it takes that one.
  cpu_only=$(mktemp)
  trap 'rm -f "$cpu_only"' EXIT
  { printf 'torch==2.13.0'; sed -n 's/^# cpu build: /\t--hash=sha256:/p' locks/dev.txt | tr -d '\n' | tr '\t' ' '; echo; } >"$cpu_only"
  install -r "$cpu_only"
fi
install "$@"
echo "  3 of 3: Poolwright itself"
pip install --no-deps --no-index --no-build-isolation -e .
touch "$venv/.ready"
