"""How Sphinx builds this documentation."""

from __future__ import annotations

import transportkit

project = "transportkit"
author = "the transportkit contributors"
project_copyright = "the transportkit contributors"
release = version = transportkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"transportkit {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are Google's style with Markdown-like single backticks, which mean code and nothing else.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autoclass_content = "both"
