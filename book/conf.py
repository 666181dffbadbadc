"""How Sphinx builds the book; `make book` calls it."""

import json
import os
import re
from importlib.metadata import version as installed

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "FSDP, lesson by lesson"
author = "the authors of fsdp_utils"
copyright = author
version = release = installed("fsdp_utils")

# The address of the repository, such as https://github.com/you/fsdp-lessons, and a branch or tag of it, as in
# setup.py; without an address, the buttons that need one (Colab, Binder, the source) are not shown.
repository = os.environ.get("REPOSITORY", "")
branch = os.environ.get("REVISION", "main")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = ["*.md", "reference/*.rst", "reference/*.md", "notebooks/*.ipynb", "notebooks/*.md"]

# ---- lessons: as they were executed ---------------------------------------------------------------------

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # a lesson's card is a table
nb_ipywidgets_js = {}  # no page asks another server for anything
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Fold the code"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
myst_heading_slug_func = "tools.build_book.jupyter_anchor"


def read_lesson(app: Sphinx, name: str, text: list[str]) -> None:
    """Fold in the book what JupyterLab folds."""
    if app.env.doc2path(name).suffix != ".ipynb":
        return
    lesson = json.loads(text[0])
    for cell in lesson["cells"]:
        tags = cell["metadata"].setdefault("tags", [])
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            tags.append("hide-input")
        for output in cell.get("outputs", []):
            data = output.get("data", {})  # what a lesson links to in an output is a page here
            for kind, link in (("text/html", r'(href="\w+)\.ipynb'), ("text/markdown", r"(\]\(\w+)\.ipynb")):
                if kind in data:
                    data[kind] = re.sub(link, r"\1.html", "".join(data[kind]))
    text[0] = json.dumps(lesson).replace("](../book/", "](../")  # those pages stand at the top here


# ---- the library's reference ----------------------------------------------------------------------------

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning"]  # the book is built without it
napoleon_use_rtype = False
default_role = "code"  # the docstrings write `name`

# ---- the look -------------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],  # a second search field
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
}
if repository:
    services = {"colab_url": "https://colab.research.google.com", "binderhub_url": "https://mybinder.org"}
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": branch,
        "launch_buttons": services,
    }
    html_theme_options |= {"use_repository_button": True, "use_source_button": True}


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_lesson)
    app.add_lexer("mermaid", TextLexer)  # drawing these takes a program of their own
