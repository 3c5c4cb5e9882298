#!/bin/bash
# Install Horovod into the active environment, after: pip install -r requirements.txt
# Its last release does not compile with today's PyTorch and TensorFlow. So this script changes some
# lines of its source and builds a wheel, once (2 to 8 minutes). The wheel stays in
# ~/.cache/horovod-wheels, for the next environment with the same PyTorch (or TensorFlow, if
# requirements.txt names that), Python and MPI. HOROVOD_WITHOUT_MPI=1 builds one for Gloo alone.
# Without the internet: bash install.sh FILE. FILE is Horovod's source, horovod-0.28.1.tar.gz, with
# the wheels of setuptools and wheel in the same folder, or a wheel that this script has built.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
recipe=3  # raise this when the build below changes: older wheels in the cache are then not used
cache="${XDG_CACHE_HOME:-$HOME/.cache}/horovod-wheels"
framework=torch cxx_standard=20 cxx_header=concepts  # what PyTorch's headers need
! grep -q ^tensorflow "$(dirname "$0")/requirements.txt" ||
    { framework=tensorflow cxx_standard=17 cxx_header=charconv; }
export TF_CPP_MIN_LOG_LEVEL=2  # TensorFlow prints errors only

fail() {
    echo "install.sh: error: $*" >&2
    exit 1
}

file="${1:+$(realpath "$1")}"
[[ ! "$file" || (-f "$file" && ("$file" == *.whl || "$file" == */horovod-$version.tar.gz)) ]] ||
    fail "$1 is neither Horovod's source, horovod-$version.tar.gz, nor a wheel"
python="$(command -v python)" ||
    fail "there is no python: activate the environment first (source .venv/bin/activate)"
key="$("$python" -c 'import importlib, sys, sysconfig
import cffi, cloudpickle, packaging, psutil, yaml
found = sys.argv[1] + importlib.import_module(sys.argv[1]).__version__
print(f"{found}-py%d.%d-{sysconfig.get_platform()}" % sys.version_info[:2])
' "$framework" 2>&1)" ||
    fail "$framework or another requirement is missing (${key##*$'\n'}):" \
        "pip install -r requirements.txt"
"$python" -m pip --version >/dev/null 2>&1 ||
    fail "$python has no pip: python -m ensurepip, or uv pip install pip"
key="${key##*$'\n'}" mpi=gloo-only
if [[ ! "${HOROVOD_WITHOUT_MPI:-}" ]] &&
    echo '#include <mpi.h>' | mpicxx -x c++ -fsyntax-only - 2>/dev/null; then
    mpi="$(mpirun --version 2>/dev/null | head -n 1 | tr -cs 'A-Za-z0-9.\n' '_')"
    mpi="${mpi:-mpi}"
fi
folder="$cache/$version-$recipe-$key-$mpi"

check_tools() {
    local cxx="${CXX:-c++}" tool
    for tool in "$cxx" cmake make; do
        command -v "$tool" >/dev/null ||
            fail "no $tool: apt-get install g++ cmake make," \
                "conda install cxx-compiler cmake make, or module load gcc cmake"
    done
    echo "#include <$cxx_header>" |
        "$cxx" -std=c++$cxx_standard -x c++ -fsyntax-only - 2>/dev/null ||
        fail "$cxx does not know C++$cxx_standard:" \
            "conda install cxx-compiler, or module load gcc (11 or newer)"
    include="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    echo '#include <Python.h>' | "$cxx" -I"$include" -x c++ -fsyntax-only - 2>/dev/null ||
        fail "no Python.h: apt-get install python3-dev (of the same version)," \
            "or dnf install python3-devel; conda's python has it"
}

change() {  # OLD NEW FILE...: change OLD to NEW, in one line of each file
    local file
    for file in "${@:3}"; do
        [[ "$(grep -c -- "$1" "$file")" == 1 ]] ||
            fail "$file of Horovod $version does not have one line with $1"
        sed -i "s/$1/$2/" "$file"
    done
}

build() {
    local work="$1" from=() tools=('setuptools==79.0.1' 'wheel==0.45.1')
    [[ ! "$file" ]] || from=(--no-index --find-links "${file%/*}")
    echo "horovod==$version --hash=sha256:$sha256" >"$work/source.txt"
    export PYTHONPATH="$work/tools"  # only for the build: the environment keeps its own setuptools
    if ! { "$python" -m pip install --quiet "${from[@]}" --target "$work/tools" "${tools[@]}" &&
        "$python" -m pip download --quiet "${from[@]}" --no-deps --no-binary :all: \
            --no-build-isolation --require-hashes --dest "$work" \
            --requirement "$work/source.txt"; }; then
        fail "the download failed, see above: run this on a machine with internet (a login node)," \
            "or there, for FILE:" \
            "pip download --no-deps --dest FOLDER horovod==$version ${tools[*]}"
    fi
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    cd "$work/horovod-$version"
    if [[ "$framework" == torch ]]; then
        change 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)' \
            CMakeLists.txt horovod/torch/CMakeLists.txt
        # Build for the CPU, also with a torch for CUDA: otherwise it needs the CUDA toolkit.
        change 'print(True if ((torch.version.cuda is not None).* else False)' 'print(False)' \
            cmake/Modules/FindPytorch.cmake
        export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1
    else
        # Without this Gloo is built twice. TensorFlow's wheel lacks the headers for XLA.
        change 'y(third_party\/gloo)' 'y(third_party\/gloo EXCLUDE_FROM_ALL)' CMakeLists.txt
        change 'list(.*xla_mpi_ops.cc")' '' horovod/tensorflow/CMakeLists.txt
        export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    fi
    # Without debug symbols: the compiler has a sixth less to do.
    change "else 'RelWithDebInfo'" "else 'Release'" setup.py
    change '^from distutils.spawn import find_executable' \
        'from shutil import which as find_executable' \
        horovod/runner/js_run.py  # distutils is gone since Python 3.12
    # The code assigns to both members. Newer versions of GCC refuse that for const.
    local flatbuffers=third_party/flatbuffers/include/flatbuffers/stl_emulation.h
    change 'pointer const data_;' 'pointer data_;' "$flatbuffers"
    change 'const size_type count_;' 'size_type count_;' "$flatbuffers"
    # Since GCC 13 other headers do not include these.
    export CXXFLAGS="${CXXFLAGS:-} -include string -include cstdint -include stdexcept"
    export HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
    export CMAKE_POLICY_VERSION_MINIMUM=3.5  # for the old bundled projects under CMake 4
    [[ "$mpi" == gloo-only ]] || export HOROVOD_WITH_MPI=1
    [[ "$mpi" != gloo-only ]] || export HOROVOD_WITHOUT_MPI=1
    if ! "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheel" . \
        >"$work/log" 2>&1; then
        grep -n -m 5 -i -E '(fatal )?error[: ]' "$work/log" >&2 || tail -n 20 "$work/log" >&2
        cp "$work/log" "$cache/failed.log"
        fail "Horovod did not compile, see above and $cache/failed.log"
    fi
    mkdir -p "$folder"
    cp "$work"/wheel/horovod-*.whl "$folder/.$$.tmp"
    mv "$folder/.$$.tmp" "$folder/$(basename "$work"/wheel/horovod-*.whl)"  # whole or not at all
}

if [[ "$file" != *.whl ]] && ! compgen -G "$folder/*.whl" >/dev/null; then
    check_tools
    mkdir -p "$cache" 2>/dev/null ||
        fail "cannot write to $cache: set XDG_CACHE_HOME to a folder that you can write to"
    echo "install.sh: building Horovod $version for $key, $mpi: 2 to 8 minutes"
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    (build "$work")
fi
[[ "$file" == *.whl ]] || file="$(echo "$folder"/*.whl)"
"$python" -m pip install --quiet --no-deps --force-reinstall "$file" ||
    fail "$file was not installed, see above"
cd /  # so that Python does not import a folder called horovod instead
sum="$(horovodrun --gloo -np 2 python -c "
import horovod.$framework as hvd
hvd.init()
print('sum', sum(hvd.allgather_object(hvd.rank() + 1)))" 2>&1)" || true
[[ "$(grep -c 'sum 3' <<<"$sum")" == 2 ]] ||
    fail "two processes did not add up 1 and 2, remove $file: $sum"
echo "install.sh: Horovod $version is installed; two processes have added up numbers over Gloo"
