"""Draw the pictures of the README and the docs from one real sweep on this CPU and from stored results of GPUs.

    python -m docs.pictures     # or `make pictures`; needs Chromium

Run it on a machine that does nothing else: the sweep states what disturbs it, and so do the pictures.
"""

import base64
import csv
import html
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import chdir
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from mlflow import MlflowClient
from PIL import Image
from rich.console import Console
from rich.text import Text

from benchmarks import acceptance_page
from docs.picture_sources import DIGESTS, PICTURES, REPOSITORY, digest_sources
from sweeper.commands.accept.page import build_html
from sweeper.commands.accept.record import read_record
from sweeper.tracking.mlflow_view import AS_CHARTS
from tests.support import browser

MLFLOW_PORT = 5077
TIMEOUT_S = 120
SIZES = "choice(256,512,768,1024)"
SWEEP = f"name=matmul hardware=cpu space.dtype=fp32 space.k=512 space.m={SIZES} space.n={SIZES}"
PLAN = "model=llama3_70b hardware=h100 gpus=256 trainer=megatron"
BUDGETS = "workload=llama8b hardware=h200 search=grid space.host_gib=70 space.device_gib=range(20,81,2)"
BAND = 0.15  # of the step's time, as `plan=true` prints it
COLUMNS, ROWS = 100, 26  # of the terminal
LASTS_S = 12  # the animation, without its last frame; a longer sweep is shown faster
WIDTH_PX, HEIGHT_PX = 8.4, 18  # of a character
COLORS = {1: "#ff7b72", 2: "#7ee787", 3: "#e3b341"}
WIDTH_OF_PAGE_PX, HEIGHT_OF_PAGE_PX = 1400, 2400  # of a picture
ASSISTANT_PX = 478  # of MLflow's panel for a chat at the right, which pictures leave out
WHOLE_PAGE = "document.body.getBoundingClientRect()"
HEADING = "[...document.querySelectorAll('h2')].find(h => h.innerText.includes('{}'))"
MAP = f"{HEADING.format('Nodes and GPUs')}.parentElement.getBoundingClientRect()"
HEATMAP = f"{HEADING.format('over m and n')}.parentElement.getBoundingClientRect()"
TIME_TO_SCALING = f"""(() => {{ const first = {HEADING.format("Where the time goes")}.getBoundingClientRect()
  const next = {HEADING.format("The fastest layout of each")}.getBoundingClientRect()
  return new DOMRect(0, first.y, {WIDTH_OF_PAGE_PX}, next.y - first.y) }})()"""


# ── the terminal ──


def record(command: list[str]) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal, and yield what it prints with the time in seconds."""
    started_s = time.monotonic()
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        os.execv(command[0], command)
    while True:
        try:
            printed = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        yield time.monotonic() - started_s, printed.decode(errors="replace")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, command


class Screen:
    """The lines of a terminal, for output that erases whole lines alone, as Rich's live display does."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.row = [*lines, ""], len(lines)

    def write(self, printed: str) -> None:
        for part in re.split(r"(\x1b\[\??[\d;]*[A-Za-z]|[\r\n])", printed):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
                self.row = max(0, self.row - int(match[1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and (part.endswith("m") or not part.startswith("\x1b[")):
                self.lines[self.row] += part

    def visible(self) -> list[str]:
        return self.lines[-ROWS:]


def draw_line(line: str) -> str:
    """Return a line with its escape sequences as spans of SVG."""
    spans = []
    for segment in Text.from_ansi(line.rstrip()).render(Console(width=COLUMNS)):
        style, text = segment.style, html.escape(segment.text.rstrip("\n"))
        color = style.color.number if style and style.color else None
        look = f' fill="{COLORS[color]}"' if color in COLORS else ""
        look += ' font-weight="bold"' if style and style.bold else ""
        look += ' opacity="0.7"' if style and style.dim else ""
        spans.append(f"<tspan{look}>{text}</tspan>" if look else text)
    return "".join(spans)


def draw_terminal(frames: list[tuple[float, list[str]]]) -> str:
    """Return an animated SVG: a line is shown from the frame that has it to the one that changes it."""
    speed = max(1.0, frames[-1][0] / LASTS_S)
    total_s = frames[-1][0] + 8 * speed  # the last frame stays for eight seconds
    ends_s = [at_s for at_s, _ in frames[1:]] + [total_s]
    texts = []
    for row in range(ROWS):
        shown = [lines[row] if row < len(lines) else "" for _, lines in frames]
        first = 0
        for number in range(len(frames)):
            if number + 1 < len(frames) and shown[number + 1] == shown[first]:
                continue
            start, end = frames[first][0] / total_s, ends_s[number] / total_s
            values, times = (
                ("hidden;visible;hidden", f"0;{start:.4f};{end:.4f}") if first else ("visible;hidden", f"0;{end:.4f}")
            )
            if drawn := draw_line(shown[first]):
                animation = (
                    ""
                    if not first and end == 1
                    else (
                        f'<animate attributeName="visibility" values="{values}" keyTimes="{times}" calcMode="discrete" '
                        f'dur="{total_s / speed:.1f}s" repeatCount="indefinite"/>'
                    )
                )
                texts.append(f'<text x="16" y="{30 + row * HEIGHT_PX}" xml:space="preserve">{drawn}{animation}</text>')
            first = number + 1
    size = f'width="{COLUMNS * WIDTH_PX + 32:.0f}" height="{ROWS * HEIGHT_PX + 32}"'
    style = "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3}"
    background = '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{background}{"".join(texts)}</svg>\n'


def record_sweep() -> str:
    """Run the sweep, draw its terminal, and return the address that it prints."""
    words = [f"'{word}'" if "(" in word else word for word in SWEEP.split()]
    screen = Screen(f"$ python -m sweeper {' '.join(words[:-2])} \\", f"    {' '.join(words[-2:])}")
    frames: list[tuple[float, list[str]]] = [(0.0, screen.visible())]
    for at_s, printed in record([sys.executable, "-m", "sweeper", *SWEEP.split()]):
        screen.write(printed)
        if at_s - frames[-1][0] < 0.3:
            frames[-1] = frames[-1][0], screen.visible()
        elif screen.visible() != frames[-1][1]:
            frames.append((at_s, screen.visible()))
    (PICTURES / "sweep.svg").write_text(draw_terminal(frames))
    return re.findall(r"http://\S+", "\n".join(screen.lines))[-1]


# ── pages ──


def photograph(
    tab: browser.Page, url: str, name: str, *expected: str, box: str = WHOLE_PAGE, hidden_px: int = 0
) -> None:
    """Save a picture of a page, or of a box of it, once the page shows the texts that are expected."""
    tab.open(url, width=WIDTH_OF_PAGE_PX + hidden_px, dark=False)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(text in tab.evaluate("document.body?.innerText ?? ''") for text in expected):
        assert time.monotonic() < deadline_s, f"{url} does not show {expected}"
        time.sleep(0.5)
    time.sleep(4)  # charts are drawn after the text
    found = tab.evaluate(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({box})")
    size = {"width": min(found["width"], WIDTH_OF_PAGE_PX), "height": min(found["height"], HEIGHT_OF_PAGE_PX)}
    clip = {**found, **size, "scale": 1}
    shot = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    picture = Image.open(BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    picture.quantize(64).save(PICTURES / name, optimize=True)


def photograph_mlflow(tab: browser.Page, folder: Path, review: str) -> None:
    """Save MLflow's list of runs, its charts and three trials side by side."""
    address = f"http://127.0.0.1:{MLFLOW_PORT}"
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(MLFLOW_PORT), "--workers", "1"]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        link = f"{address}/#{review.partition('#')[2]}"
        wait_for_server(f"{address}/health")
        photograph(tab, link, "mlflow-list.png", "matching runs", hidden_px=ASSISTANT_PX)
        photograph(tab, link + AS_CHARTS, "mlflow-charts.png", "vs. tflops", hidden_px=ASSISTANT_PX)
        client = MlflowClient(address)
        (experiment,) = (found for found in client.search_experiments() if found.name != "Default")
        ids = [experiment.experiment_id]
        best = client.search_runs(ids, "metrics.place > 0", order_by=["metrics.place"], max_results=3)
        query = {"runs": [run.info.run_id for run in best], "experiments": ids}
        words = urllib.parse.urlencode({key: json.dumps(value) for key, value in query.items()})
        photograph(
            tab,
            f"{address}/#/compare-runs?{words}",
            "mlflow-compare.png",
            "Parallel Coordinates",
            hidden_px=ASSISTANT_PX,
        )
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def wait_for_server(url: str) -> None:
    """Wait until a request to this URL has a response. Raises `OSError` if it has none in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def photograph_acceptance(tab: browser.Page, folder: Path) -> None:
    """Save the pages of two H200s and of two H100s, and the failures and the map of 512 simulated GPUs with faults."""
    for name in ("h200", "h100"):
        record = read_record(REPOSITORY / f"benchmarks/results/accept_{name}.json")
        (folder / f"{name}.html").write_text(build_html(record))
        photograph(tab, f"file://{folder}/{name}.html", f"accept-{name}.png", "Environment")
    acceptance_page.write_page(folder)
    page = f"file://{folder}/accept.html"
    photograph(tab, page, "accept.png", "Failed and open", box=f"new DOMRect(0, 0, {WIDTH_OF_PAGE_PX}, 1600)")
    photograph(tab, page, "accept-map.png", "Nodes and GPUs", box=MAP)


# ── stored results ──


def draw_budgets() -> None:
    """Draw the speed of Llama 3 8B within budgets of memory: the plan with its band, and what an H200 measured."""
    command = [
        sys.executable,
        "-m",
        "sweeper",
        "name=budgets",
        "plan=true",
        *BUDGETS.split(),
        "space.sequences_per_step=4",
    ]
    subprocess.run(command, check=True, capture_output=True)
    with open("sweeps/budgets/plan.csv", newline="") as file:
        planned = sorted((float(row["device_gib"]), float(row["tokens_per_s"])) for row in csv.DictReader(file))
    page = (REPOSITORY / "benchmarks/results/decision_h200.md").read_text().split("## Llama 3 8B within budgets")[1]
    row = r"^\| (\d+) \| ([\d,]+) \|.*?\| ([\d,]+) to ([\d,]+) \|"
    measured = [[float(cell.replace(",", "")) for cell in cells] for cells in re.findall(row, page, re.MULTILINE)]
    for name, style in (("light", "default"), ("dark", "dark_background")):
        with pyplot.style.context([style, {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 12}]):
            draw_plan_and_points(planned, measured, PICTURES / f"budgets-{name}.svg")


def draw_plan_and_points(planned: list[tuple[float, float]], measured: list[list[float]], path: Path) -> None:
    """Draw a line of (budget, rate) with its band, and points of (budget, rate, low, high)."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.6), layout="constrained")
    budgets, rates = np.array(planned).T
    axes.fill_between(budgets, rates / (1 + BAND), rates / (1 - BAND), color="#56B4E9", alpha=0.2, linewidth=0)
    axes.plot(budgets, rates, color="#56B4E9", label=f"planned without a GPU, with its band ({BAND:.0%})")
    x, y, low, high = np.array(measured).T
    label = "measured on one H200, with the 95% interval of the finals"
    axes.errorbar(x, y, [y - low, high - y], fmt="o", color="#D55E00", capsize=4, label=label)
    axes.set(
        xlabel="device memory budget, GiB", ylabel="tokens/s", ylim=(0, None), title="Training Llama 3 8B on one GPU"
    )
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder, chdir(folder), browser.open_page() as tab:
        draw_budgets()
        review = record_sweep()
        sweeper = [sys.executable, "-m", "sweeper"]
        subprocess.run([*sweeper, "report", "out=report.html"], check=True)
        subprocess.run([*sweeper, "plan", *PLAN.split(), "out=plan.html"], check=True, capture_output=True)
        photograph(tab, f"file://{folder}/report.html", "report.png", "Best results")
        photograph(tab, f"file://{folder}/report.html", "heatmap.png", "over m and n", box=HEATMAP)
        photograph(tab, f"file://{folder}/plan.html", "plan.png", "Scaling", box=TIME_TO_SCALING)
        photograph_mlflow(tab, Path(folder), review)
        photograph_acceptance(tab, Path(folder))
    DIGESTS.write_text(json.dumps(digest_sources(), indent=1) + "\n")


if __name__ == "__main__":
    main()
