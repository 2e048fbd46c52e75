"""tools/report.py: what stands in the page, that it needs nothing else, and how a browser shows it."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_records import ROOT, SLOWER, make_run, tool

from megadcp.train.metrics import read_metrics

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "lanes", lanes=8)
    make_run(folder / "stages", lanes=4, pp=2)
    return {name: folder / name for name in ("lanes", "stages")}


@pytest.fixture
def report(monkeypatch):
    return tool("report", monkeypatch)


@pytest.fixture(scope="module")
def pages(runs) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        module = tool("report", patch)
        for folder in runs.values():
            assert module.main([str(folder)]) == 0
    return {name: folder / "report.html" for name, folder in runs.items()}


class Found(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data.strip())


@pytest.mark.parametrize("name", ["lanes", "stages"])
def test_the_page_needs_nothing_from_elsewhere(pages, name):
    text = pages[name].read_text()
    found = Found(text)
    assert not {"script", "link", "iframe", "object", "embed", "img", "image"} & set(found.tags) - {"link"}
    for tag, attribute, value in found.attributes:
        assert not attribute.startswith("on"), (tag, attribute)
        if attribute in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, value)
    assert not re.search(r"@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {each for each in re.findall(r"url\(([^)]*)\)", text) if each.startswith("#")}
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in found.attributes


@pytest.mark.parametrize("name", ["lanes", "stages"])
def test_pictures_do_not_touch_each_other(pages, name):
    """Their style sheets use the same class names, and their ids may be alike."""
    text = pages[name].read_text()
    ids = [value for _, attribute, value in Found(text).attributes if attribute == "id"]
    assert len(ids) == len(set(ids))
    for wanted in re.findall(r"url\(#([^)]*)\)", text):
        assert wanted in ids
    for scope, sheet in re.findall(r'id="(picture\d+)"><svg.*?<style>(.*?)</style>', text, re.DOTALL):
        for selectors in re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", sheet)):
            assert all(one.strip().startswith(f"#{scope} ") for one in selectors.split(",")), selectors


def test_figures_are_those_of_the_records(pages, runs):
    words = Found(pages["lanes"].read_text()).words
    rows = [row for row in read_metrics(runs["lanes"] / "metrics.jsonl") if "validation_loss" not in row]
    tiles = {name: value for value, name in re.findall(r"<b>([^<]*)</b><span>([^<]*)</span>", pages["lanes"].read_text())}
    assert tiles["steps"] == "12 / 12"
    assert tiles["predicted / measured"] == f"{1 / SLOWER:.2f}"
    assert tiles["MFU, of 989 TFLOP/s dense bf16"] == "40.0%"
    assert tiles["bubble, measured"] == "5.0%"
    assert tiles["validation loss, books"] == f"{3 + 7 * math.exp(-12 / 5):.3f}"
    middle = sorted(row["static_gain"] for row in rows)
    assert tiles["predicted gain over static-best"] == f"{(middle[5] + middle[6]) / 2:.2f}x"
    assert "step-00000012" in words
    assert "the run goes on from here" in words
    assert "lane 1 is slow: <b>the same work</b> takes 1.30 times as long there" in words, "texts are shown as they are"
    assert "Step 12, planned and measured" in words
    assert not any("was busy longest" in one for one in words), "the same lane in all steps is no news"


@pytest.mark.parametrize("missing", ["plans.jsonl", "timeline.jsonl", "incidents.jsonl", "checkpoints", "latest"])
def test_a_page_of_what_is_there(runs, report, tmp_path, missing):
    shutil.copytree(runs["lanes"], tmp_path / "run")
    path = tmp_path / "run" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert report.main([str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert ("Document lengths by chosen cp" in text) == (missing != "plans.jsonl")
    assert ("planned and measured" in text) == (missing not in ("timeline.jsonl", "plans.jsonl"))
    assert ("None: no skipped step" in text) == (missing == "incidents.jsonl")


def test_rows_of_older_runs_and_bad_steps(runs, report, tmp_path):
    """Rows without the newer keys, a step that was not applied, a line that was not finished."""
    shutil.copytree(runs["lanes"], tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        for key in ("bubble", "bound_ratio", "static_gain", "slowest_lane", "mfu"):
            row.pop(key, None)
    rows[3] |= {"loss": None, "grad_norm": None, "skipped": True}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 13, "lo')
    (tmp_path / "run" / "result.json").write_text(json.dumps({"steps": 12}))
    assert report.main([str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "steps that were skipped: 4" in text
    assert "Step 12 of 12 (finished)" in text
    assert "MFU" not in text
    assert "TFLOP/s of a rank" in text


def test_what_can_not_be_done_is_one_clear_line(runs, report, tmp_path, capsys):
    own = tmp_path / "mine.html"
    own.write_text("<p>mine</p>")
    (tmp_path / "empty").mkdir()
    shutil.copy(runs["lanes"] / "run.yaml", tmp_path / "empty" / "run.yaml")
    for arguments, wanted in (
        ([str(tmp_path / "nothing")], "is no run folder"),
        ([str(tmp_path)], "run.yaml does not exist"),
        ([str(tmp_path / "empty")], "has no step in metrics.jsonl yet"),
        ([str(runs["lanes"]), "--out", str(own)], "exists and is no report; choose another name, or --overwrite"),
        ([str(runs["lanes"]), "--out", str(tmp_path / "a" / "b.html")], "there is no folder"),
    ):
        assert report.main(arguments) == 2
        assert re.fullmatch(rf"error: .*{re.escape(wanted)}.*\n", capsys.readouterr().err), wanted
    assert own.read_text() == "<p>mine</p>"


def test_it_runs_as_a_program_without_torch(runs):
    code = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(ROOT / 'tools')!r})\nimport report; sys.exit(report.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(runs["stages"])], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("report    ")


# ---------------------------------------------------------------------------------------------------------------- browser
PROBE = """
<script>
addEventListener("load", () => {
  const problems = [];
  if (document.documentElement.scrollWidth > innerWidth) problems.push("the page is wider than the window: " + document.documentElement.scrollWidth);
  for (const picture of document.querySelectorAll(".picture")) {
    const frame = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].filter(one => one.textContent).map(one => [one.textContent, one.getBoundingClientRect()]);
    texts.forEach(([words, box], at) => {
      if (box.height < 8) problems.push(picture.id + ": too small to read: " + words);
      if (box.left < frame.left - 1 || box.right > frame.right + 1) problems.push(picture.id + ": outside: " + words);
      for (const [others, other] of texts.slice(at + 1)) {
        const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (wide > 1.5 && high > 3.5) problems.push(picture.id + ": " + words + " | " + others);
      }
    });
  }
  const tile = getComputedStyle(document.querySelector(".tile"));
  const said = {problems, loaded: performance.getEntriesByType("resource").map(one => one.name),
    pictures: document.querySelectorAll(".picture").length,
    ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    line: getComputedStyle(document.querySelector(".picture .line0")).stroke};
  document.body.innerHTML = "<pre id=said></pre>";
  document.getElementById("said").textContent = JSON.stringify(said);
});
</script>"""


def browse(page: Path, folder: Path, dark: bool, width: int, *more: str) -> str:
    flags = (
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={width},900",
    )
    done = subprocess.run([BROWSER, *flags, *more, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@needs_browser
@pytest.mark.parametrize(("name", "dark", "width"), [("lanes", False, 1240), ("stages", True, 1240), ("stages", False, 800)])
def test_a_browser_shows_it(pages, tmp_path, name, dark, width):
    text = pages[name].read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)[0]
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace(policy, "").replace("</body>", PROBE + "</body>"))
    found = re.search(r'<pre id="said">(.*?)</pre>', browse(probed, tmp_path, dark, width, "--dump-dom"), re.DOTALL)
    said = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert said["loaded"] == []
    assert said["pictures"] >= 12
    scrolled = width < 1000  # then wide pictures scroll in their cards, and the others are as small as they have to be
    assert [one for one in said["problems"] if not scrolled or not re.search("small|outside", one)] == []
    ground, ink = (sum(map(int, re.findall(r"\d+", said[key])[:3])) for key in ("ground", "ink"))
    assert (ground < 200 < 500 < ink) if dark else (ink < 300 < 600 < ground)
    assert said["line"] == ("rgb(96, 165, 250)" if dark else "rgb(37, 99, 235)"), "the pictures follow the reader's system, too"


@needs_browser
def test_screenshots(pages, tmp_path):
    """Light and dark pictures of the page are made and differ; CI keeps nothing, but a person may look at them here."""
    shots = {}
    for dark in (False, True):
        path = tmp_path / f"{'dark' if dark else 'light'}.png"
        browse(pages["lanes"], tmp_path, dark, 1240, f"--screenshot={path}")
        shots[dark] = path.read_bytes()
        assert shots[dark][:8] == b"\x89PNG\r\n\x1a\n"
        assert len(shots[dark]) > 20_000
    assert shots[False] != shots[True]
