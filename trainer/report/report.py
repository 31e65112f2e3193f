#!/usr/bin/env python3
"""Makes the page of `gradwire report`.

    report.py FILE...

The page is one file without network access: page.html with page.css, charts.js, page.js, the document of
read_results.py, and plotly.js. The last two are compressed with gzip. trainer/cli/commands.cpp runs this
program. Exit codes are those of the command: 2 for bad input, with one line on standard error.
"""
import base64
import gzip
import html
import json
import pathlib
import string
import sys

from read_results import deliver, document_of, fail

FOLDER = pathlib.Path(__file__).resolve().parent
LARGEST_PAGE = 6_000_000  # bytes
POINTS = 1000  # of a curve
SCRIPTS = ("charts.js", "page.js")


def plotly_source():
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        fail(
            f"report needs plotly, which {sys.executable} does not have; install Debian's python3-plotly, or "
            "name a Python that has it in GRADWIRE_PYTHON", 1)
    return get_plotlyjs()


def packed(text):
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def page_of(document, plotly):
    def text_of(name):
        return (FOLDER / name).read_text(encoding="utf-8")

    template = string.Template(text_of("page.html"))
    title = document["title"].encode(errors="replace").decode()  # a name may be any bytes
    return template.substitute(title=html.escape(title), plotly=plotly,
                               document=packed(json.dumps(document, separators=(",", ":"))),
                               css=text_of("page.css"), script="".join(map(text_of, SCRIPTS)))


def main():
    paths = [pathlib.Path(name) for name in sys.argv[1:]]
    points = POINTS
    document = document_of(paths, points)
    plotly = packed(plotly_source())
    page = page_of(document, plotly)
    while len(page) > LARGEST_PAGE and points > 50:
        points //= 2
        page = page_of(document_of(paths, points), plotly)
    deliver(page)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # one line, like every error of the command
        fail(f"report: {type(error).__name__}: {error}", 1)
