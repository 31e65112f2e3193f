#!/usr/bin/env bash
# make docs: builds the documentation as a site with search in build/site/VERSION, from docs/, gradwire.h and
# the Python docstrings (mkdocs.yml). Warnings, such as dead links, are errors. Installs mkdocs-material in
# build/docs-tools (180 MB); later builds need no network. Pages offer the versions in build/site: copy the
# folders of others there first.
#
#   scripts/docs.sh [--smoke]    --smoke: checks the navigation; if mkdocs is installed, builds and
#                                  tests the site in headless Chromium
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
base=${PYTHON:-/usr/bin/python3}
tools=$PWD/build/docs-tools
"$base" -B scripts/docs_hooks.py
if [ ! -x "$tools/bin/mkdocs" ]; then
  [ -z "$smoke" ] || { echo "docs: the site was not built: mkdocs is not installed (make docs)"; exit 0; }
  "$base" -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8' \
    mkdocstrings-python==2.0.11 black
fi
site=$place/site
[ ! -e "$site/index.html" ] || [ -e "$site/versions.json" ] || rm -r "$site"  # a site without versions
version=$(sed -n 's/^#define GW_VERSION_[A-Z]* \([0-9]*\).*/\1/p' include/gradwire/gradwire.h | paste -sd.)
# Without the theme's advertisement of another generator.
NO_MKDOCS_2_WARNING=1 "$tools/bin/mkdocs" build --quiet --strict --site-dir "$site/$version"
"$base" -B scripts/docs_hooks.py "$site"
if grep -rlE '<(script|img|link rel="(stylesheet|preconnect|icon)")[^>]* (src|href)="?https?://' "$site" --include='*.html'; then
  echo "docs: these pages load files from other servers" >&2
  exit 1
fi
[ -z "$smoke" ] || "$base" tests/checks/site_test.py "$site" "$version"
echo "docs: $site; to search it: $base -m http.server -d $site"
