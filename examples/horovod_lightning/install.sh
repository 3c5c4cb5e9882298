#!/bin/bash
# Install Horovod into the active environment, after: pip install -r requirements.txt
# Its last release does not compile with today's torch as it is, so this changes seven lines of it and builds a wheel,
# once (2 to 5 minutes): the next environment with the same torch, Python and MPI gets that wheel from a cache.
# Without the internet: bash install.sh FILE, with its source, horovod-0.28.1.tar.gz, and what builds it in the same
# folder; or with a wheel that this has built for the same torch, Python and MPI.
set -euo pipefail

file="${1:-}"
version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
recipe=3  # raise it when what is built below changes, so that no older wheel is taken from the cache
cache="${XDG_CACHE_HOME:-$HOME/.cache}/horovod-wheels"

fail() {
    echo "install.sh: error: $*" >&2
    exit 1
}

if [[ "$file" ]]; then
    [[ "$file" == *.whl || "$file" == *horovod-$version.tar.gz ]] ||
        fail "$file is neither Horovod's source, horovod-$version.tar.gz, nor a wheel"
    [[ -f "$file" ]] || fail "there is no $file"
    file="$(realpath "$file")"
fi
python="$(command -v python)" || fail "there is no python: activate the environment first (source .venv/bin/activate)"
# Nothing is imported here, since torch takes seconds: what is missing is said at once.
key="$("$python" -c 'import sys, sysconfig, runpy
from importlib.util import find_spec
assert all(map(find_spec, ["cffi", "cloudpickle", "packaging", "psutil", "yaml"]))
torch = runpy.run_path(find_spec("torch").submodule_search_locations[0] + "/version.py")["__version__"]
print(f"torch{torch}-py{sys.version_info[0]}.{sys.version_info[1]}-{sysconfig.get_platform()}")' 2>/dev/null)" ||
    fail "torch or another requirement is missing in the environment of $python: pip install -r requirements.txt"
uv=(uv)
! "$python" -m uv --version >/dev/null 2>&1 || uv=("$python" -m uv)
if "$python" -m pip --version >/dev/null 2>&1; then
    install=("$python" -m pip install --quiet)
elif "${uv[@]}" --version >/dev/null 2>&1; then
    install=("${uv[@]}" pip install --quiet --python "$python")
else
    fail "$python has no pip, and there is no uv: python -m ensurepip"
fi

mpi=gloo-only
if [[ -z "${HOROVOD_WITHOUT_MPI:-}" ]] && echo '#include <mpi.h>' | mpicxx -x c++ -fsyntax-only - 2>/dev/null; then
    mpi="$(mpirun --version 2>/dev/null | head -n 1 | tr -cs 'A-Za-z0-9.\n' '_')"
    mpi="${mpi:-mpi}"
fi
folder="$cache/$version-$recipe-$key-$mpi"

check_tools() {
    local cxx="${CXX:-c++}" xy include
    command -v "$cxx" >/dev/null ||
        fail "no C++ compiler ($cxx): apt-get install g++, conda install cxx-compiler, or module load gcc"
    echo '#include <concepts>' | "$cxx" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
        fail "$cxx does not know C++20, which torch needs: conda install cxx-compiler, or module load gcc (11 or newer)"
    command -v cmake >/dev/null || fail "no cmake: apt-get install cmake, conda install cmake, or module load cmake"
    command -v make >/dev/null || fail "no make: apt-get install make, or conda install make"
    read -r xy include < <("$python" -c 'import sys, sysconfig
print("%d.%d" % sys.version_info[:2], sysconfig.get_path("include"))')
    echo '#include <Python.h>' | "$cxx" -I"$include" -x c++ -fsyntax-only - 2>/dev/null ||
        fail "no Python.h: apt-get install python$xy-dev, or dnf install python$xy-devel; conda's python has it"
}

change() {  # OLD NEW FILE...: one line of each file; another release may not have it any more, which is an error
    local old="$1" new="$2" file
    for file in "${@:3}"; do
        [[ "$(grep -c -- "$old" "$file")" == 1 ]] ||
            fail "$file of Horovod $version does not have exactly one line with $old: adapt install.sh to it"
        sed -i "s/$old/$new/" "$file"
    done
}

build() {
    local work="$1"
    "$python" -c 'import torch' ||
        fail "torch does not start, see above: pip install --force-reinstall -r requirements.txt"
    # The tools of the build get an environment of their own, which sees the packages that the active one sees:
    # with --system-site-packages torch may be the site's own.
    "$python" -m venv "$work/tools" >/dev/null 2>&1 ||
        "${uv[@]}" venv --quiet --clear --seed --python "$python" "$work/tools" ||
        fail "no environment to build in: apt-get install python3-venv, or pip install uv (needs the internet)"
    local tools="$work/tools/bin/python" log="$work/log"
    "$python" -c 'import sys; print(*sys.path[1:], sep="\n")' \
        >"$("$tools" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active.pth"
    local from=() needed=('setuptools==79.0.1' 'wheel==0.45.1')
    [[ -z "$file" ]] || from=(--no-index --find-links "${file%/*}")
    echo "horovod==$version --hash=sha256:$sha256" >"$work/sdist.txt"
    if ! { "$tools" -m pip install "${from[@]}" --ignore-installed "${needed[@]}" &&
        "$tools" -m pip download "${from[@]}" --no-deps --no-binary :all: --no-build-isolation --require-hashes \
            --dest "$work" --requirement "$work/sdist.txt"; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        [[ -z "$file" ]] ||
            fail "${file%/*} does not have all, see above; where there is internet:" \
                "pip download --no-deps --dest FOLDER horovod==$version ${needed[*]}"
        fail "the download failed, see above: run this where there is internet (a login node), or set the proxy"
    fi
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    cd "$work/horovod-$version"
    change 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)' CMakeLists.txt horovod/torch/CMakeLists.txt
    change 'print(True if ((torch.version.cuda is not None).* else False)' 'print(False)' \
        cmake/Modules/FindPytorch.cmake  # for CPU, whatever torch is; else it would want the whole CUDA toolkit
    change "else 'RelWithDebInfo'" "else 'Release'" setup.py  # without symbols for debuggers: a sixth less to compile
    change '^from distutils.spawn import find_executable' 'from shutil import which as find_executable' \
        horovod/runner/js_run.py  # distutils is gone since Python 3.12
    local flatbuffers=third_party/flatbuffers/include/flatbuffers/stl_emulation.h
    change 'pointer const data_;' 'pointer data_;' "$flatbuffers"  # both are assigned to, which a newer GCC refuses
    change 'const size_type count_;' 'size_type count_;' "$flatbuffers"

    # Since GCC 13 no other header includes these.
    export CXXFLAGS="${CXXFLAGS:-} -include string -include cstdint -include stdexcept"
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
    export CMAKE_POLICY_VERSION_MINIMUM=3.5  # for the old bundled projects under CMake 4
    if [[ "$mpi" == gloo-only ]]; then export HOROVOD_WITHOUT_MPI=1; else export HOROVOD_WITH_MPI=1; fi
    export MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
    if ! "$tools" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheel" . >"$log" 2>&1; then
        grep -n -m 5 -i -E '(fatal )?error[: ]' "$log" >&2 || tail -n 20 "$log" >&2
        cp "$log" "$cache/failed.log"
        fail "Horovod did not compile, see above and $cache/failed.log"
    fi
    cd "$OLDPWD"
    mkdir -p "$folder"
    cp "$work"/wheel/horovod-*.whl "$folder/.$$.tmp"
    mv "$folder/.$$.tmp" "$folder/$(basename "$work"/wheel/horovod-*.whl)"  # whole or not at all
}

if [[ "$file" != *.whl ]] && ! compgen -G "$folder/*.whl" >/dev/null; then
    check_tools
    mkdir -p "$cache" 2>/dev/null || fail "cannot write to $cache: set XDG_CACHE_HOME to a folder that you can write to"
    echo "install.sh: building Horovod $version for $key, $mpi: 2 to 5 minutes"
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    build "$work"
fi
[[ "$file" == *.whl ]] || file="$(echo "$folder"/*.whl)"
"${install[@]}" --no-deps --force-reinstall "$file" || fail "$file was not installed, see above"

cd /  # so that no folder called horovod is found instead
horovodrun -cb || fail "horovodrun does not start, see above: remove $file and run this again"
sum="$(horovodrun --gloo -np 2 python -c '
import horovod.torch as hvd, torch
hvd.init()
print("sum", int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum)))')" || sum=""
[[ "$(grep -c 'sum 3' <<<"$sum")" == 2 ]] || fail "two processes did not add up 1 and 2: $sum"
echo "install.sh: Horovod $version is installed; two processes have added up their numbers over Gloo"
