"""Metadata that depends on where the repository is; all else stands in pyproject.toml.

REPOSITORY is its address, such as https://github.com/you/fsdp-lessons, and REVISION a branch or tag of it.
With an address, the package index links it, and the links and pictures of README.md work there too.
"""

import os
import re
from pathlib import Path

from setuptools import setup

repository = os.environ.get("REPOSITORY", "").rstrip("/")
revision = os.environ.get("REVISION", "main")
readme = Path("README.md").read_text(encoding="utf-8")
urls = {}
if repository:
    if not re.fullmatch(r"https?://\S+", repository):
        raise SystemExit(f"REPOSITORY: expected an address with http:// or https://, found {repository!r}")
    urls = {
        "Source": repository,
        "Documentation": f"{repository}/blob/{revision}/README.md",
        "Changelog": f"{repository}/blob/{revision}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    to_file = r"(?!https?://|#)"
    for link, kind in ((r"!\[[^\]]*\]\(", "raw"), (r"\]\(", "blob")):
        address = f"{repository}/{kind}/{revision}/".replace("\\", r"\\")
        readme = re.sub(rf"({link}){to_file}", rf"\g<1>{address}", readme)

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
