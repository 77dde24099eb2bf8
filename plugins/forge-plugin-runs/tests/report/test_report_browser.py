"""The page in a real browser: drawn by its script under its own policy, and readable without one."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_folders import steps, write_run

from forge_plugin_runs.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--dump-dom", "--virtual-time-budget=2000", "--window-size=1400,900"),
]
LOOK = """
const seen = { violations: 0, errors: 0 };
document.addEventListener("securitypolicyviolation", () => seen.violations++);
addEventListener("error", () => seen.errors++);
addEventListener("load", () => {
  const chart = document.querySelector("svg.chart"), line = chart.querySelector(".line.c1");
  const labels = (kind) => [...chart.querySelectorAll(`.axes text.${kind}`)].map((text) => text.textContent);
  const choose = (id, value) => {
    const list = document.getElementById(id);
    list.value = value;
    list.dispatchEvent(new Event("change"));
  };
  const end = () => line.getAttribute("d").match(/-?\\d+/g).slice(-2).map(Number);
  const look = () => ({ x: labels("x"), y: labels("y"), path: line.getAttribute("d"), end: end() });
  const tipAt = (target, across, down) => {
    const box = target.getBoundingClientRect();
    const at = { clientX: box.left + across * box.width, clientY: box.top + down * box.height };
    target.dispatchEvent(new PointerEvent("pointermove", at));
    return document.getElementById("tip").textContent;
  };
  seen.charts = document.body.dataset.charts;
  seen.drawn = look();
  choose("choose-x", "time"); seen.time = look(); seen.timeTip = tipAt(chart, 0.98, 0.5);
  choose("choose-x", "tokens"); seen.tokens = look();
  choose("choose-y", "log"); seen.log = look();
  choose("choose-x", "step"); choose("choose-y", "auto"); seen.again = look();
  seen.tip = tipAt(chart, (46 + 404 * 100 / 200) / 460, 0.5);
  const map = document.querySelector(".map img"); map.scrollIntoView();
  seen.cell = tipAt(map, 0.6, 0.2);
  const evil = document.createElement("script");
  evil.textContent = "document.body.dataset.evil = 1";
  document.body.append(evil);
  seen.evil = document.body.dataset.evil || "blocked";
  seen.wide = document.documentElement.scrollWidth <= innerWidth;
  setTimeout(() => { document.title = JSON.stringify(seen); }, 50);
});
"""


def look_at(page: Path, scratch: Path, script: str = LOOK) -> tuple[dict[str, Any], str]:
    """Open the page with a further script that its policy is made to allow; returns what that saw, and the document."""
    text = page.read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "script-src " in text
    text = text.replace("script-src ", f"script-src &#x27;sha256-{digest}&#x27; ", 1)
    watched = scratch / "watched.html"
    watched.write_text(text.replace("</head>", f"<script>{script}</script></head>", 1))
    command = [BROWSER, *FLAGS, f"--user-data-dir={scratch / 'profile'}", watched.as_uri()]
    document = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", document, re.DOTALL)
    assert title is not None
    return json.loads(html.unescape(title[1])), document


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: apt-get install chromium")
def test_the_script_changes_axes_and_names_values_under_the_pages_policy(tmp_path: Path) -> None:
    counts = {"moe/load": {"0": [4.0, 4.0, 6.0, 2.0], "1": [4.0, 4.0, 4.0, 4.0]}}
    rows = steps(200)
    rows[-1]["counts"] = counts
    runs = [write_run(tmp_path / "a", rows), write_run(tmp_path / "<b>b", steps(160))]
    write_report(runs, tmp_path / "report.html")
    seen, document = look_at(tmp_path / "report.html", tmp_path)
    assert (seen["errors"], seen["violations"], seen["evil"]) == (0, 1, "blocked")  # the one script that it is to stop
    assert seen["charts"] == str(document.count('class="chart"'))
    assert seen["wide"]
    # Steps: run b ends at 160 of 200
    assert seen["drawn"]["x"] == ["0", "50", "100", "150", "200"]
    assert seen["drawn"]["path"].startswith("M")
    assert seen["again"]["end"][0] == round(40_400 * 160 / 200)
    assert seen["again"]["y"] == seen["drawn"]["y"]
    # Time: half a second for the first half of each run's steps, then one and a half
    assert seen["time"]["end"][0] == pytest.approx(40_400 * 160 / 200, abs=3)
    assert seen["time"]["x"][-1] == "3 min"
    assert "3.333 min" in seen["timeTip"]
    assert seen["tokens"]["x"][1:3] == ["20k", "40k"]
    low, high = map(float, re.search(r'data-y="(.+?) (.+?)"', document).groups())  # type: ignore[union-attr]
    last = 4 / 160**0.1
    shares = [(last - low) / (high - low), math.log(last / low) / math.log(high / low)]
    ends = [seen[view]["end"][1] for view in ("tokens", "log")]
    assert ends == pytest.approx([19_400 * (1 - share) for share in shares], abs=2)
    # The values below the pointer
    assert seen["tip"].startswith("step 100")
    assert f"a{4 / 100**0.1:.4g}" in seen["tip"]
    assert f"<b>b{4 / 100**0.1:.4g}" in seen["tip"]
    assert seen["cell"] == "layer 0, expert 21.5"
    assert "alert" not in document


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: apt-get install chromium")
def test_everything_is_there_without_a_script(tmp_path: Path) -> None:
    write_report([write_run(tmp_path / "a", steps(50))], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "plain.html").write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    count = """addEventListener("load", () => {
      const lines = [...document.querySelectorAll("svg.chart .line")];
      const shown = lines.filter((line) => line.getBoundingClientRect().width > 100);
      document.title = JSON.stringify({ lines: shown.length, color: getComputedStyle(shown[0]).stroke });
    });"""
    seen, document = look_at(tmp_path / "plain.html", tmp_path, count)
    assert seen["lines"] == document.count('class="chart"') > 1
    assert seen["color"] not in ("none", "rgb(0, 0, 0)")  # the style is let in too
