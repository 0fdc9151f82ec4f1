"""The built site in headless Chromium. Skipped, with a reason, where zensical, playwright or a browser is missing."""

import http.server
import posixpath
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.slow
# What sticks out at the right and is in no box that scrolls; figures and the table of metrics must not even then
STICKING_OUT = """() => {
  const scrolls = (e) => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const out = [...document.querySelectorAll(".md-content *, .md-header *")].filter((e) =>
    e.getBoundingClientRect().right > innerWidth + 1 && e.checkVisibility()
    && (e.matches("svg, .metrics td") || !scrolls(e.parentElement)));
  const page = document.documentElement.scrollWidth > innerWidth ? ["the page scrolls sideways"] : [];
  return page.concat(out.slice(0, 5).map((e) => `${e.tagName}.${e.getAttribute("class")} ${e.getAttribute("src")}`));
}"""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of the site. The build is strict: a warning ends it."""
    pytest.importorskip("zensical", reason="the site needs zensical: pip install -c constraints.txt -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(DOCS / "build.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out / "site"


@pytest.fixture(scope="session")
def pages(built):
    """The names of all pages."""
    return sorted(str(path.relative_to(built)) for path in built.rglob("*.html") if path.name != "404.html")


@pytest.fixture(scope="session")
def address(built):
    """Where the site is served for these tests."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium: the system's, else playwright's own."""
    pytest.importorskip(
        "playwright", reason="browser tests need playwright: pip install -c constraints.txt -e '.[docs]'"
    )
    from playwright.sync_api import Error, sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium can be started here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """An empty tab of a desktop's size, closed after the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield context.new_page()
    context.close()


def test_pages_load_without_errors_and_without_a_request_to_another_host(tab, address, pages):
    wrong = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith(address) else wrong.append(request.url))
    tab.on("response", lambda response: wrong.append(response.url) if response.status >= 400 else None)
    for page in pages:
        tab.goto(address + page, wait_until="networkidle")
    assert wrong == []


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.links += [attrs[name] for name in ("href", "src") if attrs.get(name)]


def test_every_internal_link_and_anchor_resolves(built, pages):
    parsed = {page: Links((built / page).read_text(encoding="utf-8")) for page in pages}
    broken = []
    for page, found in parsed.items():
        for link in found.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            # urljoin would drop a ".." that leaves the site.
            assert posixpath.normpath(posixpath.join(posixpath.dirname(page), link))[:2] != "..", (page, link)
            target, anchor = urldefrag(urljoin(page, link))
            target = unquote(target) or page
            target = f"{target}index.html" if target.endswith("/") or target == "." else target
            anchors = parsed[target].anchors if target in parsed else set()
            if not (built / target).exists() or (anchor and unquote(anchor) not in anchors):
                broken.append((page, link))
    assert broken == []


def test_the_slider_changes_text_and_cursor(tab, address):
    tab.goto(address + "watch.html")
    slider, cursor = tab.locator(".watch input[type=range]"), tab.locator(".cursor").first

    def state():
        texts = (tab.locator(name).first.inner_text() for name in (".watch output", ".response p", ".chart .value"))
        return [*texts, float(cursor.get_attribute("x1"))]

    before = state()
    slider.focus()
    slider.press("End")
    after = state()
    assert all(a != b for a, b in zip(before, after, strict=True)) and after[-1] > before[-1]
    slider.press("Home")
    assert state() == before
    tab.locator(".watch .play").click()
    tab.wait_for_function(f"document.querySelector('.cursor').getAttribute('x1') > {before[-1]}")


@pytest.mark.parametrize(
    "words, page",
    [
        ("GAE", "train_ppo.html"),
        ("KL negative", "guides/8_my_run_looks_wrong.html"),
        ("resume", "guides/5_long_runs.html"),
    ],
)
def test_the_first_that_the_search_finds_is_the_page_on_it(tab, address, words, page):
    tab.goto(address + "index.html", wait_until="networkidle")
    tab.keyboard.press("Control+k")
    tab.keyboard.type(words)
    tab.locator(f"ol > li:first-child a[href*='{page}']").click(timeout=10_000)
    tab.wait_for_url(f"**/{page}*")


def test_the_filter_of_the_details_shows_what_it_is_asked_for(tab, address):
    tab.goto(address + "details.html")
    shown = lambda: tab.locator(".detail:visible")  # noqa: E731
    total = shown().count()
    tab.locator("select[name=script]").select_option("train_sft.py")
    assert 0 < shown().count() < total
    tab.locator("select[name=script]").select_option("")
    tab.locator("select[name=phase]").select_option("4. Advantages")
    assert tab.locator(".detail:visible #RLOO-3").count() == 1
    tab.locator("select[name=phase]").select_option("")
    for verdict in ("perhaps", "does not show", "not measured"):
        tab.locator(f"input[value='{verdict}']").uncheck()
    assert 0 < shown().count() == tab.locator(".detail:visible .verdict.matters").count()
    tab.locator("input[name=words]").fill("siblings")
    assert tab.locator(".detail:visible #RLOO-9").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(browser, address, pages, scheme):
    """No text of low contrast, no button without a name, and whatever else axe-core's rules for WCAG 2 A and AA see."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="this needs axe-playwright-python").Axe()
    options = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa"]}
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    tab, bad = context.new_page(), {}
    for page in pages if scheme == "light" else ["index.html", "train_rloo.html", "details.html"]:
        tab.goto(address + page)
        if found := axe.run(tab, options=options).response["violations"]:
            bad[page] = {fault["id"]: [node["html"][:80] for node in fault["nodes"][:3]] for fault in found}
    context.close()
    assert bad == {}


def test_a_newcomer_gets_from_the_first_page_to_a_line_and_to_its_price_in_one_click(tab, address):
    """PPO's penalty for a missing EOS: the line is marked, and its card with the price stands in the same window."""
    tab.goto(address + "index.html")
    tab.get_by_role("link", name="A response that does not end pays a penalty").click()
    line, card = tab.locator("#at-REW-3"), tab.locator("#REW-3")
    tab.wait_for_url("**/train_ppo.html#at-REW-3")
    tab.wait_for_function("document.querySelector('#REW-3').getBoundingClientRect().top > 0")
    for box in (line.bounding_box(), card.locator(".prices").bounding_box()):
        assert 0 < box["y"] < 900
    number = tab.locator(".line:has(#at-REW-3)").get_attribute("data-line")
    assert f"train_ppo.py, line {number}" in card.locator("dl").inner_text()


def test_nothing_is_wider_than_a_phone(tab, address, pages):
    bad = {}
    tab.set_viewport_size({"width": 360, "height": 900})
    for page in pages:
        tab.goto(address + page)
        if found := tab.evaluate(STICKING_OUT):
            bad[page] = found
    assert bad == {}


def test_a_figure_of_two_panels_scrolls_on_a_phone_instead_of_shrinking(tab, address):
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.goto(address + "evidence/11_distillation.html")
    figure = tab.locator("article p:has(> a > img)").first
    shown, whole = figure.evaluate("x => [x.clientWidth, x.scrollWidth]")
    assert shown < 390 and whole > 600
