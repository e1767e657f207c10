"""The page in a real browser: nothing fails, everything is drawn, headers sort, colours follow, nothing runs over on a telephone."""

import pytest
from report import browser
from report.sample import SCRIPT

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: none of " + ", ".join(browser.NAMES) + " is on the path")


@pytest.fixture(scope="module")
def window():
    with browser.Browser() as opened:
        yield opened


@pytest.fixture
def page(window, folder):
    window.problems.clear()
    window.requests.clear()
    window.open(folder / "index.html")
    yield window
    assert window.problems == []
    assert {request for request in window.requests if not request.startswith("data:")} == {(folder / "index.html").resolve().as_uri()}


def first_column(page, table=0):
    return page.run(f"[...document.querySelectorAll('table.sortable')[{table}].tBodies[0].rows].map(row => row.cells[0].textContent)")


def test_every_figure_is_drawn(page, report):
    sizes = page.run(
        "[...document.querySelectorAll('figure svg')].map(svg => {"
        "const box = svg.getBBox(); return [svg.clientWidth, svg.clientHeight, box.width, box.height]; })"
    )
    assert len(sizes) == len(report.figures)
    assert all(min(size) > 50 for size in sizes)
    images = page.run(
        "Promise.all([...document.querySelectorAll('figure image')].map(async one => {"
        "const image = new Image(); image.src = one.href.baseVal; await image.decode(); return image.naturalWidth; }))"
    )
    assert len(images) >= 2
    assert all(width > 1 for width in images)


def test_headers_sort_by_mouse_and_keyboard(page):
    as_it_was = first_column(page)
    assert as_it_was == ["Transformer", "Performer", "PermuteFormer"]
    header = "document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[1]"
    order = []
    for expected in ("ascending", "descending", "none"):
        page.run(f"{header}.querySelector('button').click()")
        assert page.run(f"{header}.getAttribute('aria-sort')") == expected
        order.append(first_column(page))
    assert order == [
        ["Performer", "PermuteFormer", "Transformer"],  # what has no number stays at the end
        ["PermuteFormer", "Performer", "Transformer"],
        as_it_was,
    ]
    page.run("document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells[0].querySelector('button').focus()")
    page.press("Enter")
    assert first_column(page) == ["Performer", "PermuteFormer", "Transformer"]
    assert page.run("document.querySelectorAll('[aria-sort=ascending]').length") == 1


def test_numbers_sort_as_numbers(page, report):
    place = next(i for i, table in enumerate(report.tables) if table.name == "table-2-small")
    table = f"document.querySelectorAll('table.sortable')[{place}]"
    page.run(f"{table}.tHead.rows[0].cells[1].querySelector('button').click()")
    values = [float(value) for value in page.run(f"[...{table}.tBodies[0].rows].map(row => row.cells[1].dataset.value)")]
    assert values == sorted(values)
    assert values != sorted(values, key=str)


def test_a_script_that_slipped_in_would_not_run(window, folder, tmp_path):
    """The page's own policy, tried on a copy with a hole in it."""
    copy = tmp_path / "index.html"
    copy.write_text((folder / "index.html").read_text().replace("<main>", f"<main>{SCRIPT}<img src='http://127.0.0.1:9/x.png'>", 1))
    window.problems.clear()
    window.open(copy)
    assert window.run("document.title") == "PermuteFormer: report"
    assert sum("Content Security Policy" in problem for problem in window.problems) >= 2


def test_a_number_leads_to_its_runs(page):
    page.run("document.querySelector('td.failed a').click()")
    page.until("document.querySelector(':target details').open")
    assert page.run("document.querySelector(':target h3').textContent") == "Table 1 · small · Text · Transformer"


@pytest.mark.parametrize(("dark", "width"), [(False, 360), (True, 768), (True, 1280)])
def test_colours_follow_the_system_and_the_button_and_nothing_runs_over_the_side(page, folder, dark, width):
    page.run("try { localStorage.clear() } catch {}")
    page.open(folder / "index.html", dark=dark, width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('figure')].every(one => one.getBoundingClientRect().right <= innerWidth)")

    def is_light():
        red = page.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        ink = page.run("Number(getComputedStyle(document.querySelector('figure svg text')).fill.match(/\\d+/)[0])")
        assert (red > 200) == (ink < 60)  # text of figures has contrast
        return red > 200

    assert is_light() is not dark
    page.run("document.getElementById('theme').click()")
    assert is_light() is dark
    page.run("try { localStorage.clear() } catch {}")


def test_print_is_on_white_whatever_the_theme(page, folder):
    page.open(folder / "index.html", dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    page.call("Emulation.setEmulatedMedia", media="", features=[])


def test_what_is_pressed_has_a_name_and_tables_have_headers(page):
    assert page.run("[...document.querySelectorAll('button')].every(one => one.textContent.trim())")
    for scope in ("col", "row"):
        assert page.run(f"[...document.querySelectorAll('table.sortable')].every(one => one.querySelector('th[scope={scope}]'))")
    assert page.run("[...document.querySelectorAll('figure svg')].every(one => one.getAttribute('role') === 'img')")
    assert page.run("[...document.querySelectorAll('figure svg > title')].every(one => one.textContent)")
