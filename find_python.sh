#!/bin/sh
# Prints the interpreter that `make` uses, or the one of the versions given:
#
#   sh find_python.sh [VERSION ...]
#
# Without versions: a working Python 3.7 or 3.6, for TensorFlow 1.15, where that has
# wheels (Linux on x86-64), else python3, for TensorFlow 2.x. "Working" means that it
# runs and can make a virtual environment: a version manager's shim may do neither.

works() {
    "$1" -c 'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null
}

ask_version_manager() {
    command -v pyenv >/dev/null 2>&1 || return 1
    for version in $(pyenv whence "python$1" 2>/dev/null | sort -r); do
        works "$(pyenv prefix "$version" 2>/dev/null)/bin/python$1" && return
    done
    return 1
}

if [ $# -eq 0 ]; then
    default=yes
    [ "$(uname -sm)" = 'Linux x86_64' ] && set -- 3.7 3.6
fi
for version in "$@"; do
    works "python$version" && exit
    ask_version_manager "$version" && exit
done
if [ "$default" = yes ]; then
    works python3 && exit
fi
echo "no working Python ${*:-3} found: install one with venv, or say PYTHON=..." >&2
exit 1
