"""Lists the versions in a site's folder for the theme's menu, and redirects its first page to the newest.

    docs_versions.py SITE
"""
import json
import pathlib
import sys


def number(version):
    return [int(part) for part in version.split(".")]


def main():
    site = pathlib.Path(sys.argv[1])
    found = sorted((page.parent.name for page in site.glob("[0-9]*/index.html")), key=number, reverse=True)
    listed = [{"version": version, "title": version, "aliases": []} for version in found]
    listed[0]["aliases"] = ["latest"]
    (site / "versions.json").write_text(json.dumps(listed) + "\n")
    (site / "index.html").write_text(
        f'<!doctype html><title>Gradwire</title><meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n')


if __name__ == "__main__":
    main()
