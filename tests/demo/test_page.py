"""The page in a real browser: mouse and keyboard, wide and narrow windows, light and dark colours."""

import time

import pytest
from demo.conftest import serving
from report import browser
from small_data import png
from train.conftest import image_run, make_run, pair_run  # noqa: F401 - fixtures

from permuteformer.demo import api
from permuteformer.train.generate import Generation
from permuteformer.train.trained_model import load

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: none of " + ", ".join(browser.NAMES) + " is on the path")

READY = "head !== null && $('version').textContent !== ''"


@pytest.fixture(scope="module")
def window():
    with browser.Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reading(classifier):
    with serving(classifier) as server:
        yield server.address


@pytest.fixture
def page(window, reading):
    window.problems.clear()
    window.requests.clear()
    window.open(reading, still=True)
    window.until(READY)
    yield window
    assert window.problems == []
    assert all(request.startswith((reading, "data:")) for request in window.requests)  # no requests to other hosts


def text(page, id):
    return page.run(f"$('{id}').textContent")


def change(page, id, value):
    page.run(f"$('{id}').value = '{value}'")
    page.run(f"$('{id}').dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_the_keyboard_moves_the_position(page):
    page.run("$('position').focus()")
    assert text(page, "back").startswith("16 of 16")
    page.press("ArrowRight")
    page.until("$('position').value === '1'")
    moved = page.run("head.places[1].filter((feature, place) => feature === place).length")
    assert text(page, "back").startswith(f"{moved} of 16")
    assert page.run("head.permuteformer[1].toFixed(3)") in text(page, "score-text")
    page.press("End")
    page.until("$('position').labels[0].querySelector('b').textContent === '64'")
    where = page.run("beads.map((bead) => bead.at)")
    expected = page.run("(() => { const at = []; head.cycles.forEach((cycle) => cycle.features.forEach((place, rank) => "
                        "{ at[head.places[64][place]] = rank; })); return at; })()")  # fmt: skip
    assert where == expected
    rounds = page.run("beads.map((bead) => bead.turns - bead.at / bead.n)")
    assert rounds == pytest.approx([round(number) for number in rounds])


def test_every_control_changes_the_head(page):
    before = page.run("JSON.stringify(head)")
    page.click("#next")
    page.until("$('seed').value === '1'")
    page.until(f"JSON.stringify(head) !== {before!r}")
    page.run("$('features').focus()")
    page.press("ArrowRight")
    page.until("head.axis.length === 20")
    assert page.run("document.querySelectorAll('#rings g').length") == 20
    change(page, "decay", "none")
    page.until("head.r === null")


def visible(page, kind):
    return page.run(f"[...document.querySelectorAll('[data-kind~={kind}]')].every((one) => !one.hidden)")


def test_an_encoder_decays_on_both_sides(page):
    assert visible(page, "lm")
    assert not visible(page, "encoder")
    assert page.run("head.map.permuteformer[0].slice(1).every((weight) => weight === 0) && head.distances[0] === 0")
    page.click("input[name=kind][value=encoder]")
    page.until("head.two_sided")
    assert visible(page, "encoder")
    assert not visible(page, "lm")
    assert page.run("head.map.permuteformer[0][1] > 0 && head.distances[0] < 0")
    change(page, "decay", "number")
    page.until("head.r === 0.9")
    assert page.run("!$('rate-label').hidden")
    assert page.run("document.querySelectorAll('#scores .similarity').length === head.distances.length")


def test_an_image_names_the_axis_of_its_head(page):
    page.click("input[name=kind][value=image]")
    page.until("head.axes === 2 && head.decay_axis === 0")
    assert page.run("!$('row').labels[0].hidden && head.order.length === 2")
    assert "rows" in text(page, "along")
    change(page, "head", 1)
    page.until("head.decay_axis === 1")
    assert "columns" in text(page, "along")
    pixels = page.run("[...$('permuteformer').getContext('2d').getImageData(0, 0, 15, 15).data]")
    opacity = [pixels[3::4][15 * row : 15 * (row + 1)] for row in range(15)]
    assert opacity[8][7] > opacity[7][8]  # the next pixel of the column has more weight than that of the row


def test_a_bad_number_gets_the_message_of_the_server(page):
    page.run("$('head').focus(); $('head').select()")
    page.write("99")
    page.until("!$('problem').hidden")
    assert "7, got 99" in text(page, "problem")
    page.run("$('head').select()")
    page.write("2")
    page.until("$('problem').hidden")
    page.problems.clear()  # the browser logs every status that is not 200


def test_play_and_pause_with_the_keyboard(page):
    page.run("$('play').focus()")
    page.press("Enter")
    assert text(page, "play") == "Pause"
    page.until("Number($('position').value) >= 2")
    page.press("Enter")
    assert text(page, "play") == "Play"


def test_a_typed_text_is_predicted_and_explained(page):
    page.click("#text")
    page.write("a good <b>film</b>")
    page.click("#predict")
    page.until("document.querySelectorAll('#bars .share').length === 2")
    assert "%" in text(page, "bars")
    page.click("#explain")
    page.until("!$('attribution').hidden")
    assert text(page, "attribution-text")
    assert text(page, "attributed") == "a good <b>film</b>"
    assert page.run("document.querySelectorAll('#attributed b').length") == 0
    assert page.run("document.querySelectorAll('#attributed .for2, #attributed .against2').length") >= 1
    assert page.run("document.querySelectorAll('#largest tbody tr').length") == 3


def test_a_text_is_generated_and_stopped(window, speaker, monkeypatch):
    class Slow(Generation):
        def __next__(self):
            time.sleep(0.01)  # 2,000 tokens take 20 seconds at least
            return super().__next__()

    monkeypatch.setattr(api, "Generation", Slow)
    window.problems.clear()
    with serving(speaker) as server:
        window.open(server.address, still=True)
        window.until(READY)
        window.click("#text")
        window.write("Once")
        window.run("$('tokens').value = 2000")
        window.click("#generate")
        window.until("$('generated').textContent.length > 30")
        window.click("#stop")
        window.until("$('stop').hidden && !$('generate').disabled")
        generated = text(window, "generated")
        assert generated.startswith("Once")
        assert len(generated) < 2000
        assert window.run("$('model-problem').hidden")
        window.run("$('tokens').value = 5")
        window.run("$('generate').focus()")
        window.press("Enter")
        window.until("$('stop').hidden && $('generated').textContent.length < 40")
        assert window.run("$('model-problem').hidden")
    assert window.problems == []


def test_a_chosen_image_is_explained(window, image_run, tmp_path):  # noqa: F811
    window.problems.clear()
    (tmp_path / "one.png").write_bytes(png(6, 250))
    with serving(load(image_run)) as server:
        window.open(server.address, still=True)
        window.until(READY)
        window.click("#explain")
        window.until("!$('model-problem').hidden")
        assert "image" in text(window, "model-problem")
        node = window.call("DOM.querySelector", nodeId=window.call("DOM.getDocument")["root"]["nodeId"], selector="#image")["nodeId"]
        window.call("DOM.setFileInputFiles", files=[str(tmp_path / "one.png")], nodeId=node)
        window.click("#explain")
        window.until("document.querySelectorAll('#attributed canvas').length === 2")
        corner = "document.querySelector('#attributed canvas').getContext('2d').getImageData(0, 0, 1, 1).data"
        assert window.run(f"[...{corner}]") == [250, 250, 250, 255]
        assert window.run("document.querySelectorAll('#largest tbody tr').length") == 8
    assert window.problems == []


def test_two_typed_texts_are_explained(window, pair_run):  # noqa: F811
    with serving(load(pair_run)) as server:
        window.open(server.address, still=True)
        window.until(READY)
        window.click("#text")
        window.write("a1")
        window.click("#second")
        window.write("b2")
        window.click("#explain")
        window.until("document.querySelectorAll('#attributed p').length === 2")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_overflows_and_colours_follow_the_system(page, reading, width, dark):
    page.open(reading, width=width, dark=dark, still=True)
    page.until(READY)
    for kind, ready in {"image": "head.axes === 2", "encoder": "head.axes === 1 && head.two_sided", "lm": "!head.two_sided"}.items():
        page.click(f"input[name=kind][value={kind}]")
        page.until(ready)
        assert page.run("document.documentElement.scrollWidth") <= width
        boxes = "[...document.querySelectorAll('input, select, button, figure, svg, canvas')].map((one) => one.getBoundingClientRect())"
        assert page.run(f"{boxes}.every((box) => box.right <= innerWidth)")
    red = page.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (red < 60) is dark
    assert len(page.picture()) > 20_000


def test_controls_have_names_and_can_be_reached_by_tab(page):
    assert page.run("[...document.querySelectorAll('input, select, textarea')].every((one) => one.labels.length > 0)")
    assert page.run("[...document.querySelectorAll('[role=img]')].every((one) => one.getAttribute('aria-label'))")
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(40):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.name"))
        if page.run("document.activeElement.matches('input, button, select')"):
            assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    expected = "text predict explain features permutation seed next head decay kind alike play position"
    assert set(expected.split()) <= reached
