"""Write the acceptance page of a simulated cluster: 512 H100s with faults in seven parts.

    python -m benchmarks.acceptance_page FOLDER

Healthy rates are drawn with the spreads of `sweeper/commands/accept/spreads.csv` around the expected rates. Verdicts,
causes and page come from the command. Writes accept.json and accept.html, and prints what was found.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance import PER_NODE, draw_readings
from sweeper.commands.accept.causes import add_causes
from sweeper.commands.accept.expected import expected_rates
from sweeper.commands.accept.experiments import EQUAL_CLOCK, Reading, read_experiments
from sweeper.commands.accept.judge import Verdict, describe, judge, overall_verdict
from sweeper.commands.accept.main import find_problems
from sweeper.commands.accept.measure import UNITS
from sweeper.commands.accept.page import build_html
from sweeper.commands.accept.record import build_record, write_record
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.preflight.devices import planned_target

NODES = 64
SEED = 48
CLOCK_MHZ, STEP_MHZ = 1395, 15
EFFICIENCY_SPREAD = 0.003
# GB/s of tests without an expected rate, as measured on two H100s.
RATES = {"copy from host": 52.3, "copy to host": 50.6, "all-reduce 64 KiB": 1.6}
GPU = {"vendor": "nvidia", "responds": True, "name": "NVIDIA H100 80GB HBM3", "driver": "580.95.05", "ecc": True}
GPU |= {"memory_gib": 79.6, "power_limit_w": 700.0, "power_default_w": 700.0, "pcie_width": 16, "pcie_width_max": 16}


@dataclass(frozen=True)
class Fault:
    """A fault of one part."""

    part: str  # a GPU such as `n7 GPU 3`, a node, or a link between two nodes
    name: str  # of the fault
    share: Mapping[str, float]  # of the rate that remains, by a text in the test's name
    cause: str  # a text that the command's cause must contain
    beside: Mapping[str, Any] = field(default_factory=dict)  # readings taken during the test
    state: Mapping[str, Any] = field(default_factory=dict)  # of the GPU, or of the node's port `mlx5_0`


FAULTS = (
    Fault(
        "n7 GPU 3",
        "power limit of 450 W",
        {"products": 0.78},
        "its power is limited to 450 W of 700 W",
        {"sm_clock_mhz": 1080, "power_w": 449.0, "power_limit_w": 450.0},
        {"power_limit_w": 450.0},
    ),
    Fault("n12 GPU 5", "another process", {"products": 0.5, "copy": 0.6}, "another process", state={"used_gib": 21.4}),
    Fault("n19 GPU 0", "8 of 16 PCIe lanes", {"host": 0.5}, "8 of 16 lanes", state={"pcie_width": 8}),
    Fault(
        "n23 GPU 6",
        "bad cooling",
        {"products": 0.84},
        "slowed by hardware_thermal at 93.0 °C",
        {"sm_clock_mhz": 1170, "power_w": 560.0, "temperature_c": 93.0, "slowed_by": "hardware_thermal"},
    ),
    Fault(
        "n31 GPU 2",
        "4 NVLinks down",
        {"pair all-reduce": 0.7, "node all-reduce 1 GiB": 0.7, "node all-to-all": 0.7},
        "4 of its links to other GPUs are down",
        state={"links_down": 4},
    ),
    Fault("n40", "NIC at half its rate", {"link": 0.5}, "n40 is slow with most", state={"port": "200 Gb/sec (4X HDR)"}),
    Fault("n2 + n63", "slow path between two nodes", {"link": 0.45}, "the path between them"),
)


def simulate() -> dict[str, Any]:
    """Return the record of the acceptance."""
    planned = planned_target(catalogue()["h100"], PER_NODE)
    node = replace(planned.nodes[0], gpus=PER_NODE, cpus=192)
    target = replace(planned, nodes=(node,) * NODES)
    states = {f"n{number}": make_state(f"n{number}") for number in range(NODES)}
    readings = [_with_faults(reading) for reading in _healthy(target, node)]
    expected = _expected(target, node)
    by_part = {(r.test, r.part): expected[r.test] for r in readings if r.test in expected}
    judgements = add_causes(judge(readings, "gpu", by_part, {}), states)
    findings = find_problems(target, list(target.nodes), list(states.values()))
    verdict = overall_verdict(judgements, findings)
    sentence = describe(verdict, judgements, findings)
    return build_record(target, "quick", sentence, judgements, findings, states)


def _expected(target: Target, node: Any) -> dict[str, float]:
    one, two = (replace(target, nodes=(node,) * count) for count in (1, 2))
    targets = {"device": one, "pair": one, "node": one, "link": two, "whole": target}
    rates: dict[str, float] = {}
    for experiment in read_experiments("gpu", "quick"):
        own = targets[experiment.scope]
        rates |= expected_rates(own, experiment, own.devices)
    return rates


def _healthy(target: Target, node: Any) -> Iterator[Reading]:
    random, expected = np.random.default_rng(SEED), _expected(target, node)
    units = {test: UNITS[m] for e in read_experiments("gpu", "quick") for test, m in e.tests.items()}
    for drawn in draw_readings(random, NODES):
        if drawn.test.endswith(EQUAL_CLOCK):
            continue
        usual = expected.get(drawn.test) or next((r for text, r in RATES.items() if text in drawn.test), 100.0)
        beside: dict[str, Any] = {}
        if "products" in drawn.test:
            efficiency = 1 + EFFICIENCY_SPREAD * random.standard_normal()
            clock_mhz = STEP_MHZ * round(CLOCK_MHZ * drawn.value / efficiency / STEP_MHZ)
            beside = {"sm_clock_mhz": clock_mhz, "power_w": 699.0, "power_limit_w": 700.0}
            beside["temperature_c"] = round(61 + 3 * random.standard_normal())
        yield replace(drawn, value=usual * drawn.value, unit=units[drawn.test], beside=beside)


def _with_faults(reading: Reading) -> Reading:
    """Return the reading, changed by the faults of its part, its GPUs and its nodes."""
    for fault in FAULTS:
        place, _, gpu = fault.part.partition(" GPU ")
        gpus = reading.part.partition(" GPU ")[2].split(" + ")
        is_own = fault.part == reading.part
        is_own |= bool(gpu) and reading.nodes == (place,) and (gpu in gpus or reading.scope == "node")
        is_own |= not gpu and reading.scope == "link" and place in reading.nodes
        share = next((left for text, left in fault.share.items() if text in reading.test), 1.0)
        if is_own and share < 1.0:
            reading = replace(reading, value=share * reading.value, beside={**reading.beside, **fault.beside})
    return reading


def make_state(name: str) -> dict[str, Any]:
    """Return the state that is read from a node, including its faults."""
    state: dict[str, Any] = {
        "node": name,
        "kernel": {"release": "6.8.0-60-generic", "command_line": ["iommu=pt"], "is_guest": False},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "ray": "2.60.0", "nvidia-nccl-cu13": "2.28.9"},
        "networks": {f"mlx5_{port} port 1": "400 Gb/sec (4X NDR), active" for port in range(PER_NODE)},
        "gpus": [{"number": number, **GPU} for number in range(PER_NODE)],
        **{"cpus": 192, "governor": "performance", "use": 3.0},
        **{"shared_gib": 1024.0, "free_gib": 1900.0, "disk_gib": 900.0},
    }
    for fault in FAULTS:
        place, _, gpu = fault.part.partition(" GPU ")
        if place == name and gpu:
            state["gpus"][int(gpu)] |= fault.state
        elif place == name and "port" in fault.state:
            state["networks"]["mlx5_0 port 1"] = f"{fault.state['port']}, active"
    return state


def tabulate(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown row per fault: the tests that fail on its part or node, and whether all name its cause."""
    is_open = (Verdict.FAIL, Verdict.INCONCLUSIVE)
    failed, explained = [row for row in record["results"] if row["verdict"] in is_open], set[str]()
    yield "| fault | part | tests that fail or are inconclusive there | cause |\n|---|---|---|---|"
    for fault in FAULTS:
        place, _, gpu = fault.part.partition(" GPU ")
        own = [row for row in failed if row["part"] == place or (place in row["nodes"] and bool(gpu) != _is_link(row))]
        explained |= {f"{row['test']} {row['part']}" for row in own}
        is_named = own and all(fault.cause in row["cause"] for row in own)
        yield f"| {fault.name} | {fault.part} | {len(own)} | {'as injected' if is_named else 'NOT as injected'} |"
    elsewhere = [row for row in failed if f"{row['test']} {row['part']}" not in explained]
    yield f"\nFailed or inconclusive elsewhere: {len(elsewhere)}."


def _is_link(row: Mapping[str, Any]) -> bool:
    return bool(row["scope"] == "link")


def write_page(folder: Path) -> dict[str, Any]:
    """Write the record and its page, accept.json and accept.html, and return the record."""
    record = simulate()
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "accept.json", record)
    (folder / "accept.html").write_text(build_html(record))
    return record


if __name__ == "__main__":
    written = write_page(Path(sys.argv[1]))
    print(written["sentence"])
    print("\n".join(tabulate(written)))
