# shellcheck shell=bash
# The one set-up that every script shares. Source it, then call `ensure_venv`.
#
# Leaves: $ROOT (the checkout), $VENV (its virtual environment, $QUOTA_VENV or .venv).
# A repeated call costs two small processes: the set-up is skipped while pyproject.toml, the
# interpreter and the place of the checkout are the ones it was made with.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
VENV="${QUOTA_VENV:-$ROOT/.venv}"

die() {
    printf 'quota-ledger: %s\n' "$*" >&2
    exit 1
}

# Prints the first interpreter that is new enough. Newest first; $PYTHON, if given, is the only candidate.
find_python() {
    local candidate found="" version
    for candidate in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3 python}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        # A version manager's shim may exist for a version that is not installed: ask it, do not trust its name.
        version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
        found="$found $candidate($version)"
    done
    if [ -n "$found" ]; then
        die "Python 3.11 or newer is needed; found only:$found. Install a newer one, or name it: PYTHON=/path/to/python3.12 $0"
    fi
    die "Python 3.11 or newer is needed and none was found${PYTHON:+ as \"$PYTHON\"}. Install it (Debian/Ubuntu: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 $0"
}

venv_stamp() {
    printf '%s %s\n' "$(cksum <"$ROOT/pyproject.toml")" "$ROOT"
}

venv_is_current() {
    [ -x "$VENV/bin/python" ] && [ -f "$VENV/.quota-stamp" ] &&
        [ "$(cat "$VENV/.quota-stamp")" = "$(venv_stamp)" ] && "$VENV/bin/python" -c '' 2>/dev/null
}

make_venv() {
    local python="$1" version
    if [ -e "$VENV" ] && ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        # Half made, or its interpreter is gone. Only what venv itself left there is thrown away.
        [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] ||
            die "$VENV exists and is not a virtual environment; move it away or set QUOTA_VENV"
        rm -rf "$VENV"
    fi
    if [ ! -e "$VENV/bin/python" ]; then
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            die "$python has no venv or ensurepip. Debian/Ubuntu: apt-get install python$version-venv"
        "$python" -m venv "$VENV" || die "could not make a virtual environment in $VENV (see above)"
    fi
    printf 'quota-ledger: installing into %s (once) ...\n' "$VENV" >&2
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[dev]" >&2 ||
        die "pip could not install the project (see above); is a package index reachable?"
    venv_stamp >"$VENV/.quota-stamp.new" && mv "$VENV/.quota-stamp.new" "$VENV/.quota-stamp"
}

# Makes or refreshes the virtual environment; safe when several scripts start at once.
ensure_venv() {
    local python
    venv_is_current && return 0
    python="$(find_python)" || exit 1
    exec 9>"$VENV.lock" || die "cannot write $VENV.lock; is the checkout yours? (QUOTA_VENV=/elsewhere moves the environment)"
    # The lock belongs to the open file, so it outlives the process that takes it for us; flock(1) is not everywhere.
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || die "cannot lock $VENV.lock"
    venv_is_current || make_venv "$python"
    exec 9>&-
}
