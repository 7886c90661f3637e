"""The page at /ui: the routes that it calls, and all its tabs in a real browser."""

import base64
import re
import shutil
from itertools import permutations

import numpy as np
import pytest
import torch.nn.functional as F
from serving.over_http import NAMES, fastapi, httpx, listening
from serving.served import ROUNDING, TEXTS, same

from fastbert.inference import EntityTagger, MaskFiller, SentenceEncoder, attention_of
from fastbert.serving import Service, create_app, load

KEY = "Schlüssel 鍵"


@pytest.fixture(scope="module")
def address(directory):
    """The address of the service, mounted below a path of another application."""
    service, outer = Service([load(directory / name) for name in NAMES]), fastapi.FastAPI()
    outer.mount("/below", create_app(service, [KEY]))
    with listening(outer) as address:
        yield f"{address}/below"
    service.close()


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, headers={"authorization": f"Bearer {KEY}".encode()}) as client:
        yield client


def test_it_is_one_file_that_asks_nobody_else(client, address):
    page = httpx.get(f"{address}/ui")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|//\w|@import|url\(|innerHTML", re.sub(r"^\s*// .*$", "", page.text, flags=re.M))
    assert httpx.get(f"{address}/ui/models").status_code == 401
    found = client.get("/ui/models").json()
    assert found["models"]["reranker"] == ["rerank", "classification"] and found["tokens"]["masks"] == {
        "mask": "[MASK]"
    }


def test_attention(client, directory):
    found = client.post("/ui/attention", json={"inputs": TEXTS[0], "model": "tags"}).json()
    tagger = EntityTagger.from_pretrained(directory / "tags")
    tokens, weights = attention_of(tagger.model, tagger.tokenizer, TEXTS[0])
    assert found["tokens"] == tokens and found["shape"] == list(weights.shape[:3])
    given = np.frombuffer(base64.b64decode(found["weights"]), "<f4").reshape(weights.shape)
    same(given, weights)
    for inputs, status in (("cat " * 35, 413), ("cat " * 25, 200), ("", 422), (" ", 422), (["a"], 422)):
        assert client.post("/ui/attention", json={"inputs": inputs, "model": "tags"}).status_code == status


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(paths):
        pytest.skip("no chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(paths[1]))
    yield driver
    driver.quit()


class Page:
    def __init__(self, browser, address, pictures):
        self.browser, self.pictures = browser, pictures
        browser.get(f"{address}/ui")
        self.wait(lambda: self.all("dialog[open] input") or self.all("nav button"))
        if asked := self.all("dialog[open] input"):
            asked[0].send_keys(KEY)
            self.all("dialog button")[0].click()
        self.wait(lambda: self.all("nav button"))

    def all(self, css):
        return self.browser.find_elements("css selector", css)

    def wait(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 20).until(lambda _: condition())

    def do(self, tab, model=None, **fields):
        """Fills in and submits a tab; returns the element of the result, and saves a picture of the page."""
        next(button for button in self.all("nav button") if button.text == tab).click()
        section = next(section for section in self.all("section") if section.get_attribute("id") == tab)
        for name, value in fields.items():
            field = section.find_element("name", name)
            field.clear()
            self.browser.execute_script("arguments[0].value = arguments[1]", field, value)
        if model:
            section.find_element("name", "model").send_keys(model)
        section.find_element("css selector", "form button").click()
        result = section.find_element("css selector", ".result")
        self.wait(lambda: result.find_elements("xpath", "./*"))
        self.browser.save_screenshot(str(self.pictures / f"{tab}.png"))
        return result


@pytest.fixture
def page(browser, address, tmp_path):
    found = Page(browser, address, tmp_path)
    yield found
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert [message for message in messages if "responded with a status of 4" not in message] == []


def numbers(element):
    return [float(cell.text.rstrip(" %")) for cell in element.find_elements("css selector", "td.number")]


@pytest.mark.slow
def test_every_tab(page, directory):
    tabs = [button.text for button in page.all("nav button")]
    assert tabs == ["Compare", "Search", "Classify", "Rerank", "Fill masks", "Label", "Attention"]
    vectors = F.normalize(SentenceEncoder.from_pretrained(directory / "sentences").encode(TEXTS), dim=-1)
    cosines = (vectors @ vectors.T).flatten()
    shown = numbers(page.do("Compare", texts="\n".join(TEXTS)))  # with two decimals
    np.testing.assert_allclose(shown, cosines, rtol=0, atol=0.005 + ROUNDING)
    found = page.do("Search", text="\n\n".join(TEXTS * 20), query=TEXTS[1]).find_elements("css selector", "tr")
    assert len(found) == 10 and all(row.text.startswith("1.000") and TEXTS[1] in row.text for row in found)
    assert "good" in page.do("Classify", "classes", texts="\n".join(TEXTS)).text
    assert len(page.do("Rerank", query="rain?", texts="\n".join(TEXTS)).find_elements("css selector", "tr")) == 4
    filler = MaskFiller.from_pretrained(directory / "masks")
    expected = [fill.token for fills in filler(["The [MASK] sits [MASK]."])[0] for fill in fills]
    rows = page.do("Fill masks", text="The [MASK] sits [MASK].").find_elements("css selector", "tr")
    assert [row.find_elements("css selector", "td")[-1].text for row in rows] == expected
    tagger = EntityTagger.from_pretrained(directory / "tags")
    texts = [f"🙂 {' '.join(words)} <b>& {words[0]}</b>" for words in permutations(" ".join(TEXTS).split(), 3)]
    text, entities = next((text, found) for text in texts if len(found := tagger([text])[0]) > 1)
    labelled = page.do("Label", text=text)
    marks = [mark.text.removesuffix(entity.label).strip() for mark, entity in
             zip(labelled.find_elements("css selector", "mark"), entities, strict=True)]  # fmt: skip
    assert marks == [entity.text for entity in entities]
    shown = page.do("Attention", "masks", text=TEXTS[0]).find_elements("css selector", "canvas")
    config = filler.config
    assert len(shown) == config.num_hidden_layers * config.num_attention_heads + 1
    inked = """const c = arguments[0], d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
    return d.filter((value, i) => i % 4 == 3 && value > 200).length"""
    assert all(page.browser.execute_script(inked, canvas) > 0 for canvas in shown)


@pytest.mark.slow
def test_what_goes_wrong_is_said(page):
    assert page.do("Compare", texts="").text == "There is no text."
    assert "has no [MASK]" in page.do("Fill masks", text="nothing").text
    assert "expected at most 32" in page.do("Attention", text="cat " * 80).text
