"""The built book: each page is whole, fetches nothing from elsewhere, and runs in a browser without error."""

import json
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fsdp_utils
from book.first_figure import RANKS, WRAPPINGS, gathered, on_a_gpu, record
from tests.chromium import dumped
from tools.build_book import AXE, BUILD, LARGEST_BYTES, ROOT

HTML = BUILD / "html"

pytestmark = pytest.mark.skipif(not HTML.exists(), reason="there is no book yet: make book")

# of what the console says; the theme also tells there which colours it takes
WRONG = re.compile(r"CONSOLE.*(Uncaught|[Ee]rror|Failed|Refused|ERR_|404)")  # after the time

PAGES = sorted(path for path in HTML.rglob("*.html") if not {"_modules", "_static"} & {*path.parts})
NAMES = [str(path.relative_to(HTML)) for path in PAGES]


def test_the_book_has_all_lessons_and_is_small() -> None:
    lessons = {f"notebooks/{path.stem}.html" for path in (ROOT / "notebooks").glob("*.ipynb")}
    pages = {"index.html", "README.html", "search.html", "notebooks/glossary.html", "videos.html"}
    assert lessons | pages <= set(NAMES)
    assert sum(path.stat().st_size for path in HTML.rglob("*") if path.is_file()) <= LARGEST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_all_its_images_scripts_and_links(name: str) -> None:
    page = HTML / name
    text = page.read_text(encoding="utf-8")
    assert "<p>| " not in text  # a table that was not understood as one
    loaded = re.findall(r"<(?:img|script|iframe)\b[^>]*?\bsrc=\"([^\"]+)\"", text)
    loaded += re.findall(r"<link\b(?![^>]*rel=\"(?:search|canonical))[^>]*?\bhref=\"([^\"]+)\"", text)
    assert [url for url in loaded if urlsplit(url).scheme in ("http", "https")] == []

    missing = []
    for url in {*loaded, *re.findall(r"<a\b[^>]*?\bhref=\"([^\"]+)\"", text)}:
        parts = urlsplit(unescape(url))
        if parts.scheme or parts.netloc:
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        if not target.exists():
            missing.append(url)
        elif parts.fragment and target.suffix == ".html":
            anchor = re.escape(unquote(parts.fragment))
            if not re.search(rf"\bid=\"{anchor}\"", unescape(target.read_text(encoding="utf-8"))):
                missing.append(url)
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_without_an_error_and_asks_nobody(name: str, tmp_path: Path) -> None:
    page, said = dumped(f"file://{HTML}/{name}", tmp_path)
    assert [line for line in said if WRONG.search(line)] == []
    assert all('data-ready="yes"' in sliders for sliders in re.findall(r"<div data-sliders=.*?>", page))


FRAMED = """<iframe src="{page}" style="width: {width}px; height: 900px"></iframe><pre id="said"></pre>
<script>
onload = async () => {{
  const frame = document.querySelector("iframe").contentWindow, root = frame.document.documentElement;
  const still = frame.document.createElement("style");  // else axe sees colours on their way to the theme's
  still.textContent = "* {{ transition: none !important; }}";
  root.append(still);
  root.dataset.theme = root.dataset.mode = "{theme}";
  const axe = frame.document.createElement("script");
  axe.src = "{axe}";
  await new Promise(loaded => {{ axe.onload = loaded; root.append(axe); }});
  const {{ violations, passes }} = await frame.axe.run({{ runOnly: ["wcag2a", "wcag2aa"] }});
  const wider = root.scrollWidth - root.clientWidth;
  const found = violations.map(({{ id, nodes }}) => [id, nodes[0].html]);
  document.getElementById("said").textContent = JSON.stringify({{ wider, found, passes: passes.length }});
}}</script>"""


@pytest.mark.skipif(not AXE.exists(), reason="there was no npm to fetch axe-core with")
@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (390, "dark"), (1400, "light"), (1400, "dark")])
@pytest.mark.parametrize("name", ["index", "README", "cheat_sheet", "notebooks/17_fine_tune_three_ways"])
def test_a_page_can_be_read_on_a_telephone_in_the_dark_and_by_a_reader_of_screens(
    name: str, width: int, theme: str, tmp_path: Path
) -> None:
    framed = HTML / f"framed_{name.replace('/', '_')}_{width}_{theme}.html"
    framed.write_text(FRAMED.format(page=f"{name}.html", width=width, theme=theme, axe=AXE.as_uri()))
    try:
        page, _ = dumped(f"file://{framed}", tmp_path)
    finally:
        framed.unlink()
    said = re.search(r"<pre id=\"said\">(.*?)</pre>", page, re.DOTALL)
    assert said
    assert (checked := json.loads(unescape(said[1] or "{}")))["passes"] > 10
    assert (checked["wider"], checked["found"]) == (0, [])


def test_search_finds_reduce_scatter(tmp_path: Path) -> None:
    page, _ = dumped(f"file://{HTML}/search.html?q=reduce_scatter", tmp_path)
    found = re.search(r"id=\"search-results\".*", page, re.DOTALL)
    assert found
    assert "notebooks/00_fsdp_from_scratch.html" in found[0]


def test_folded_code_and_solutions_are_folded() -> None:
    text = (HTML / "notebooks/00_fsdp_from_scratch.html").read_text(encoding="utf-8")
    assert re.search(r"<details class=\"[^\"]*hide[^\"]*\">", text)
    assert "<details><summary>Solution</summary>" in text
    assert "<details open" not in text


def test_what_the_first_page_says_of_its_figure() -> None:
    traces = [fsdp_utils.run_on_ranks(record, name, world_size=RANKS)[0] for name in WRAPPINGS]
    assert [gathered(on_a_gpu(trace)) for trace in traces] == [1, 0.5, 0.125]
    for begin_us in (30, 50, 100, 150):
        one, by_block, too_small = (on_a_gpu(trace, begin_us * 1e-6).step_s for trace in traces)
        assert by_block < min(one, too_small)
    one, by_block, too_small = (on_a_gpu(trace, 20e-6).step_s for trace in traces)
    assert too_small < by_block < one


def test_the_first_page_has_the_doors_of_the_readme() -> None:
    doors = [
        set(re.findall(r"^\| ([^|]+) \| [^|\n]*\|$", (ROOT / name).read_text().split("\n## ")[0], re.M))
        for name in ("README.md", "book/index.md")
    ]
    assert "one hour" in doors[0]
    assert doors[0] <= doors[1]


@pytest.mark.skipif(not (HTML / "cheat_sheet.pdf").exists(), reason="there was no Chromium to print it")
def test_the_cheat_sheet_takes_four_pages_at_most() -> None:
    pages = re.findall(rb"/Type\s*/Page\b(?!s)", (HTML / "cheat_sheet.pdf").read_bytes())
    assert 1 <= len(pages) <= 4


def test_buttons_that_need_an_address_are_hidden_while_there_is_none() -> None:
    text = (HTML / "notebooks/00_fsdp_from_scratch.html").read_text(encoding="utf-8")
    assert "colab.research" not in text
    assert "mybinder" not in text
