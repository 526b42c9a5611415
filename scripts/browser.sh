#!/usr/bin/env bash
# Installs Chromium, in which tests/comparison/browser_test.py opens the page of compare.py, from the packages of the
# system: Debian, as root. Where a browser is there already, nothing is done.
set -euo pipefail

have_browser() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    command -v google-chrome >/dev/null; }

if have_browser; then exit 0; fi
if ! { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 install --yes \
        --no-install-recommends chromium && have_browser; }; then
    echo "Chromium could not be installed (apt-get install chromium): the page of compare.py cannot be tested." >&2
    exit 1
fi
