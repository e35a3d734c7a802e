"""How Sphinx makes the site: `make docs`. Its pages are the Markdown files of the repository where they are."""

from __future__ import annotations

from rammer.version import __version__

project = "rammer"
version = release = __version__
extensions = ["myst_parser"]
root_doc = "docs/index"
#: A page is a file of this list. Other files that pages link to (sources, data) can be downloaded from the site.
include_patterns = [
    "docs/*.md",
    "docs/design/*.md",
    "docs/howto/*.md",
    "docs/examples/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "plugins/**/*.md",
    "tests/kit/**/*.md",
]
exclude_patterns = [".*", "**/.*", "**/build", "**/dist", "**/*.egg-info", "docs/_build"]
myst_heading_anchors = 4
#: Result files are reached by links from one table, and begin with one.
suppress_warnings = ["toc.not_included", "myst.header"]

html_theme = "furo"
html_title = f"rammer {__version__}"
html_extra_path = ["site"]
html_copy_source = False
html_show_sphinx = False
