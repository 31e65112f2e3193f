"""Hooks of mkdocs.yml: pages from other files, links out of docs/, and lists as GitHub reads them.

    docs_hooks.py             fails unless the navigation of mkdocs.yml lists every page exactly once
    docs_hooks.py SITE        lists the versions in the folder for the theme's menu, and redirects its first
                              page to the newest
"""
import collections
import json
import os
import pathlib
import re
import sys

import docs_c_api

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The address of the sources; until it is set (CONTRIBUTING.md) links to sources become text.
SOURCE, = re.findall(r'^Source = "(.+)"$', (ROOT / "integrations/python/pyproject.toml").read_text(), re.M)
SOURCE = "" if "gradwire.example" in SOURCE else f"{SOURCE}/blob/main"
PYTHON_MODULES = ("gradwire", "gradwire.torch", "gradwire.fsdp", "gradwire.jax", "gradwire.lightning",
                  "gradwire.accelerate", "gradwire.transformers")
# Room for the 110 columns of an example, and no line breaks inside a table's code.
CSS = """.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) code { word-break: normal; overflow-wrap: normal; }
"""
# Pages that are not in docs/, and the functions that write them.
PAGES = {
    "index.md": lambda: from_root("README.md"),
    "CHANGELOG.md": lambda: from_root("CHANGELOG.md"),
    "CONTRIBUTING.md": lambda: from_root("CONTRIBUTING.md"),
    "SECURITY.md": lambda: from_root("SECURITY.md"),
    "python.md": lambda: "\n\n".join(["# Python reference"] + [
        f"## {name}\n\n::: {name}" for name in PYTHON_MODULES]),
    "c.md": lambda: docs_c_api.page(ROOT),
}


def from_root(name):
    """Returns a page of the root folder, with links as from docs/."""
    text = re.sub(r"\[docs/([\w-]+)\.md\]\(", r"[\1](", (ROOT / name).read_text())
    return text.replace("](docs/", "](")


def on_config(config):
    header = (ROOT / "include/gradwire/gradwire.h").read_text()
    config.site_name += " " + ".".join(re.findall(r"#define GW_VERSION_\w+ (\d+)", header))
    return config


def on_files(files, config):
    from mkdocs.structure.files import File

    for name, text in PAGES.items():
        files.append(File.generated(config, name, content=text()))
    files.append(File.generated(config, "site.css", content=CSS))
    return files


def link(match, folder, source):
    """Returns a link of a page as the site needs it: files outside docs/ and folders are not pages."""
    text, target = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, _, anchor = target.partition("#")
    file = pathlib.Path(os.path.normpath(ROOT / "docs" / folder / path))
    if ROOT not in file.parents:
        return match[0]  # an address of GitHub, such as of a workflow's badge
    name = file.relative_to(ROOT).as_posix()
    if (file / "README.md").is_file() and name.startswith("docs/"):
        return f"[{text}]({path.rstrip('/')}/README.md{'#' if anchor else ''}{anchor})"
    if file.is_dir() or (not name.startswith("docs/") and name not in PAGES):
        return f"[{text}]({source}/{name})" if source else text
    return match[0]


LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<=[\s(])docs/([\w-]+)\.md(?![`\]#])")  # a page in a text that C or the command prints
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)
# A line of text, followed by the first line of a list.
TEXT_THEN_LIST = re.compile(r"^((?! *(?:[-*]|\d+\.) |\|)\S.*\n)(?=(?:[-*]|\d+\.) )", re.M)


def on_page_markdown(markdown, page, config, files):
    folder = os.path.dirname(page.file.src_uri)
    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(lambda match: link(match, folder, SOURCE), parts[i])
        parts[i] = NAMED.sub(r"[\1](\1.md)", parts[i]) if not folder else parts[i]
        parts[i] = TEXT_THEN_LIST.sub(r"\1\n", parts[i])
    # GitHub needs a backslash in front of | in a table's code; here it would be shown.
    return re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
                  "".join(parts), flags=re.M)


def wrong_navigation():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | {*PAGES}
    listed = collections.Counter(re.findall(
        r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.M))
    return [*(f"the navigation lacks {page}: add it" for page in sorted(pages - set(listed))),
            *(f"no page is named {page}: remove it" for page in sorted(set(listed) - pages)),
            *(f"{page} is listed {count} times" for page, count in listed.items() if count > 1)]


def list_versions(site):
    found = sorted((page.parent.name for page in site.glob("[0-9]*/index.html")), reverse=True,
                   key=lambda version: [int(part) for part in version.split(".")])
    listed = [{"version": version, "title": version, "aliases": []} for version in found]
    listed[0]["aliases"] = ["latest"]
    (site / "versions.json").write_text(json.dumps(listed) + "\n")
    (site / "index.html").write_text(
        f'<!doctype html><title>Gradwire</title><meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n')


if __name__ == "__main__":
    if len(sys.argv) > 1:
        list_versions(pathlib.Path(sys.argv[1]))
    elif wrong := wrong_navigation():
        sys.exit("\n".join(f"mkdocs.yml: {line}" for line in wrong))
