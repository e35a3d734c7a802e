#!/usr/bin/env bash
# Runs the conformance kit and a sample of the tests with the newest Python that every dependency has a wheel for: one on PATH, or
# one that apt downloads from Debian and that runs from its folder. Installs and tests a copy of the checkout in build/newest.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$PWD/.venv/bin/python work=$PWD/build/newest && root=$work/root apt=$work/apt venv=$work/venv tree=$work/tree
rm -rf "$work/tmp" "$apt" "$tree" && mkdir -p "$work/tmp" "$tree"
trap 'rm -rf "$work/tmp" "$apt"' EXIT
export TMPDIR=$work/tmp XDG_CACHE_HOME=$work/cache OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PIP_ONLY_BINARY=:all: PIP_QUIET=2

# Run apt-get with private package lists of Debian's release $1.
private_apt() {
  mkdir -p "$apt"/{lists/partial,archives/partial,preferences.d} && : > "$apt/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $1 main" > "$apt/sources.list"
  apt-get -qq -o Dir::Etc="$apt" -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt" \
    -o APT::Sandbox::User= -o Acquire::Languages=none -o APT::Update::Error-Mode=any "${@:2}"
}
# Unpack Python $2 of Debian's release $1 and its libraries into $root. A script in its place starts it with its own C library.
unpack() {
  rm -rf "$root" "$apt" && private_apt "$1" update || return
  private_apt "$1" install -y --no-install-recommends --download-only "python$2" libstdc++6 > "$work/tmp/log" || return
  for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$root" || return; done
  set -- "$root/usr/bin/python$2" "$root"/usr/lib/*-linux-gnu*/ld-linux-*.so.*
  mv "$1" "$1.elf" && printf '#!/bin/sh\nexec "%s" --library-path "%s" --argv0 "$0" "%s" "$@"\n' "$2" "${2%/*}" "$1.elf" > "$1"
  chmod +x "$1" && "$1" -c 'import ctypes, ssl, venv'
}
for python in python3.{14,13,12} "$root"/usr/bin/python3.{14,13} ''; do
  if "${python:-true}" -c 'import ctypes, ssl, venv' 2>/dev/null; then break; fi
done
if [ -z "$python" ] && command -v apt-get >/dev/null; then
  if unpack forky 3.14; then python=$root/usr/bin/python3.14; elif unpack trixie 3.13; then python=$root/usr/bin/python3.13; fi
fi
[ -n "$python" ] || { echo "newest Python: none newer than 3.11 is on PATH and apt brings none: nothing tested"; exit 0; }

tar -c --exclude={./build,./dist,'./.?*',__pycache__,*.egg-info} . | tar -x -C "$tree" && cd "$tree"
rm -rf "$venv" && "$python" -m venv --without-pip "$venv" && PATH=$venv/bin:$PATH
"$base" -m pip download --no-deps -d "$TMPDIR" pip || { echo "newest Python: pip cannot be downloaded: nothing tested"; exit 0; }
pip() { PYTHONPATH=$(echo "$TMPDIR"/pip-*.whl) python -m pip install --no-compile --no-cache-dir -c constraints.txt "$@"; }
pip setuptools && pip --no-build-isolation pytest-xdist -e core -e . -e tests/kit -e benchmarks -e plugins/rocm -e plugins/ipu_sim \
  -e plugins/cuda -e core/rammer/plugin-template \
  || { echo "newest Python: wheels for $(python -V) could not be installed: nothing tested"; exit 0; }

# Check device $1; print what did not pass, and the count. Another process of the machine can disturb checks of times: if only these
# fail, all checks run once more.
check() {
  local found passed
  for _ in 1 2; do
    passed=1 && found=$(python -m rammer_testing.conformance --device "$1" 2>&1 | grep -Ev '  (ok|skipped)\>') || passed=
    echo "conformance of $1: $found"
    [ -z "$passed" ] || return 0
    ! grep -Evq '^(prices|clocks|trace) |^[0-9]+ of [0-9]+ checks failed' <<< "$found" || return 1
  done
  return 1
}
failed=0
check toy || failed=1
check ipu_sim || failed=1
if rammer devices | grep '^rocm:0 *ok' >/dev/null; then check rocm || failed=1; fi
core=(tests/core/test_{child_processes,crew,hooks,machine,names,no_devices,plugin_faults,reports}.py)
python -m pytest -n 2 --dist worksteal -m "not slow and not large" -k "not cuda" -p no:cacheprovider \
  tests/cli tests/documents/test_interface.py "${core[@]}" || failed=1
echo "newest Python: tested $(python -V)" && exit $failed
