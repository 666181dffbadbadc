"""The built book by keyboard alone: every link and control is reached, is seen when it is, and works."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chromium import Page
from tools.build_book import BUILD

HTML = BUILD / "html"
INDEX, LESSON = "index.html", "notebooks/14_plan_before_you_rent.html"

pytestmark = pytest.mark.skipif(not HTML.exists(), reason="there is no book yet: make book")

# what the keyboard is on; not seen is what has neither outline nor shadow, or lies outside of the window
FOCUS = """(() => {
  const on = document.activeElement;
  if (on === document.body) return null;
  window.reached.add(on);
  const style = getComputedStyle(on), box = on.getBoundingClientRect();
  const ring = style.outlineStyle != "none" && parseFloat(style.outlineWidth) > 0;
  const shadow = style.boxShadow != "none" && !style.boxShadow.startsWith("rgba(0, 0, 0, 0)");
  const inside = box.right > 0 && box.bottom > 0 && box.x < innerWidth && box.y < innerHeight;
  return [(ring || shadow) && inside, on.outerHTML.slice(0, 200)];
})()"""
STILL = """window.reached = new Set();
document.head.append(Object.assign(document.createElement("style"), {
  textContent: "* { transition: none !important; }"}))"""
LEFT_OUT = """[...document.querySelectorAll("a[href], button, input, select, summary")]
  .filter(one => one.checkVisibility({visibilityProperty: true}) && one.tabIndex >= 0 && !one.disabled)
  .filter(one => !window.reached.has(one)).map(one => one.outerHTML.slice(0, 200))"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens one page of the book."""
    pages: list[Page] = []

    def open_page(name: str, width: int = 1400) -> Page:
        pages.append(Page(tmp_path, width=width))
        pages[0].open((HTML / name).as_uri())
        return pages[0]

    yield open_page
    for page in pages:
        page.close()


@pytest.mark.parametrize(
    ("name", "width"), [(INDEX, 390), (INDEX, 1400), (LESSON, 1400), ("notebooks/answers.html", 390)]
)
def test_the_keyboard_reaches_everything_and_is_seen(
    opened: Callable[..., Page], name: str, width: int
) -> None:
    page = opened(name, width)
    page.run(STILL)
    unseen = []
    for _ in range(2000):
        page.press("Tab")
        if (focus := page.run(FOCUS)) is None:
            break
        if not focus[0]:
            unseen.append(focus[1])
    else:
        pytest.fail("the keyboard never leaves the page")
    assert (unseen, page.run(LEFT_OUT)) == ([], [])


def test_the_first_figure_changes_with_its_buttons(opened: Callable[..., Page]) -> None:
    page = opened(INDEX)
    pressed = "document.querySelector('[data-player] [aria-pressed=true]').innerText"
    figure = "document.querySelector('[data-player] svg').outerHTML"
    before, drawn = page.run(pressed), page.run(figure)
    page.run("document.querySelector('[data-player] [aria-pressed=false]').focus()")
    page.press("Enter")
    page.wait(lambda: page.run(pressed) != before and page.run(figure) != drawn)


def test_a_slider_calculates(opened: Callable[..., Page]) -> None:
    page = opened(LESSON)
    shown = "document.querySelector('[data-sliders]').innerText"
    before = page.run(shown)
    page.run("document.querySelector('[data-sliders] input[type=range]').focus()")
    page.press("ArrowRight")
    page.wait(lambda: page.run(shown) != before)


def test_folded_code_opens(opened: Callable[..., Page]) -> None:
    page = opened(LESSON)
    page.run("document.querySelector('main summary').focus()")
    page.press("Enter")
    page.wait(lambda: page.run("document.querySelector('main details').open"))


def test_control_k_searches(opened: Callable[..., Page]) -> None:
    page = opened(INDEX)
    page.press("k", control=True)
    page.wait(lambda: page.run("document.activeElement.type") == "search")
