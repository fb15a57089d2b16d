"""Measure the rates of the local GPUs and links, for use in plans.

    python -m sweeper calibrate hardware=h200 dir=results

Runs sweeps of GEMMs, grouped GEMMs, launches, memory copies, AdamW's update, attention and, with several GPUs,
collectives, which takes three to six minutes.
GEMMs and attention run back to back and are measured only after clocks and power have settled, because short runs reach
rates 10 to 20% above the rates in training.

Writes DIR/calibration/HARDWARE.yaml and, with several GPUs, HARDWARE_topology.yaml. From then on, python -m sweeper
plan in DIR and plans of sweeps with dir=DIR use these rates for this hardware and print the path of the file;
calibration=none ignores the file. Prints the value that each rate replaces. To resume after an interruption, or to
remeasure trials that failed because other processes used the device, rerun the command. Rerunning a complete
calibration measures everything again. To discard an incomplete calibration, delete DIR/calibration/HARDWARE.unfinished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sweeper.cli.command import Cluster as ClusterSection
from sweeper.cli.command import Subcommand
from sweeper.cli.exits import INTERRUPTED, SOME_FAILED
from sweeper.cli.multirun import SweepQueue, run_queues
from sweeper.commands.calibrate import rates
from sweeper.commands.calibrate.rates import Cells, Row, measured_topology
from sweeper.commands.calibrate.sweeps import gpus_per_node, plan_sweeps
from sweeper.common.format import describe_use
from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Target
from sweeper.execution import ray_environment
from sweeper.pages.terminal import open_console
from sweeper.preflight.calibration import (
    FOLDER,
    Calibration,
    CalibrationFile,
    device_key,
    write_calibration,
    write_yaml,
)
from sweeper.preflight.clusters import default_topology, find_device
from workloads.api.cores import CoreWatch
from workloads.hardware.cluster import Cluster, Device


@dataclass(frozen=True, kw_only=True)
class CalibrateRequest:
    """The devices to measure.

    Attributes:
        hardware: name of a local GPU model, or cpu.
        dir: results directory; the files are written to the subfolder calibration/.
    """

    hardware: str = "auto"
    dir: str = "."
    cluster: ClusterSection = field(default_factory=ClusterSection)


def run(request: CalibrateRequest) -> int:
    """Measure the rates, write the files and print the replaced values. Return the exit code."""
    directory = Path(request.dir).expanduser().resolve()
    target = find_target(request)
    key = device_key(target.hardware)
    path = directory / FOLDER / f"{key}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    known = target.hardware.name in catalogue() or not target.is_gpu
    further = [f"hardware={target.hardware.name if known else 'auto'}"]
    further += [f"cluster.address={request.cluster.address}"] if request.cluster.address else []
    further += ["cluster.insecure=true"] if request.cluster.insecure else []
    name, busy = begin_or_resume(unfinished, key, find_use(target))
    if busy:
        print(f"busy     {busy}: the rates may be too low", flush=True)
    sweeps = plan_sweeps(target, name, directory, further)
    code = run_queues([SweepQueue("", [sweep.words for sweep in sweeps.values()])])
    rows = {name: sweep.read_rows() for name, sweep in sweeps.items()}
    if code == INTERRUPTED or not rows["matmul"]:
        missing = ", ".join(name for name, trials in rows.items() if not trials)
        print(f"calibration: not complete ({missing or 'interrupted'}); rerun the same command to resume")
        return code or SOME_FAILED
    open_console(soft_wrap=False).print(rates.draw_replacements(write_files(path, target, rows, busy)))
    print(f"method   {rates.describe_conditions(rows['matmul'])}")
    if busy:
        print(f"busy     {busy}: the rates may be too low; rerun the command when the devices are idle")
    for name, trials in rows.items():
        if not trials:
            print(f"missing  {name}: no trial succeeded; see {sweeps[name].folder}")
    for written in (path, CalibrationFile(path, Calibration("", "", "")).topology_path):
        if written.exists():
            print(f"written  {written}")
    failed = {name: len(sweep.without_result) for name, sweep in sweeps.items()}
    if any(failed.values()):
        counts = ", ".join(f"{number} of {name}" for name, number in failed.items() if number)
        print(f"calibration: trials without a result: {counts}; rerun the same command to measure them again")
    else:
        unfinished.unlink()
    return code


def find_target(request: CalibrateRequest) -> Target:
    """Return the devices to measure. Raises UserInputError if the device kind is unknown or absent."""
    ray_environment.prepare(request.cluster.address, request.cluster.insecure)
    from sweeper.execution import cluster  # imports Ray, which takes a second

    target, _ = cluster.find_target(request.hardware, request.cluster.address, request.cluster.insecure)
    cluster.stop()
    return target


def begin_or_resume(unfinished: Path, hardware: str, use: Sequence[str]) -> tuple[str, str]:
    """Return the name of the interrupted calibration, or a new name if there is none, and how other processes have used
    the devices in all of its runs, including `use` in this one. Keep both for a resumed calibration."""
    lines = unfinished.read_text().splitlines() if unfinished.exists() else []
    name, *earlier = lines or [f"calibration-{hardware}-{datetime.now(UTC):%Y%m%d-%H%M%S}"]
    notes = list(dict.fromkeys([*earlier, *use]))
    unfinished.write_text("\n".join([name, *notes, ""]))
    return name, "; ".join(notes)


def find_use(target: Target) -> list[str]:
    """Return how other processes use the devices before the measurement, as sentences without a full stop."""
    if target.is_gpu:
        return target.describe_foreign_use()
    cores, process = CoreWatch().find_use()
    return [describe_use(cores, process, target.devices)] if cores else []


def write_files(path: Path, target: Target, rows: Mapping[str, list[Row]], busy: str = "") -> list[Cells]:
    """Write the device file and the topology file. Return table rows that show which value each rate replaces."""
    products = rates.sustained_tflops(rows["matmul"])
    reference = products.get("bf16") or next(iter(products.values()))
    headroom = round(rates.power_headroom(rows["matmul"]), 3) if target.is_gpu else 1.0
    bandwidths = {row["param.operation"]: rates.figure_of(row, "gb_per_s") for row in rows["memory"]}
    calibration = Calibration(
        hardware=device_key(target.hardware),
        device=target.model,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        torch=version("torch"),
        conditions=rates.describe_conditions(rows["matmul"]),
        busy=busy,
        sustained_tflops=products,
        power_headroom=headroom,
        grouped_tflops=rates.grouped_tflops(rows["grouped"]),
        copy_gb_s=bandwidths.get("copy"),
        update_gb_s=bandwidths.get("update"),
        launch_us=rates.launch_us(rows["launch"][0]) if rows.get("launch") else None,
        attention=rates.attention_rates(rows["attention"], reference.value, headroom),
    )
    write_calibration(path, calibration)
    before = find_device(target.hardware)
    replacements = list(rates.device_replacements(calibration, before, rows))
    links = rows.get("collectives")
    if not links:
        return replacements
    # Two processes on a CPU stand in for two GPUs of a node.
    gpus, per_node = (target.devices, gpus_per_node(target)) if target.is_gpu else (2, 2)
    assumed = default_topology(target.hardware)
    topology = measured_topology(links, assumed, gpus, per_node)
    measured = "links" if per_node == gpus else "links and network" if per_node > 1 else "network"
    values = {name: value for name, value in asdict(topology).items() if name != "name"}
    values["source"] = f"{measured} of {gpus} x {target.model}, {calibration.date}; the rest is assumed"
    comment = "Measured by python -m sweeper calibrate; plans use it for this device unless topology= names another."
    write_yaml(CalibrationFile(path, calibration).topology_path, values, comment)
    device = before or Device(target.hardware.name, {}, 0.0, 0.0, None, {})
    return [*replacements, *rates.link_replacements(topology, assumed, links, Cluster(device, assumed, gpus))]


COMMAND = Subcommand("calibrate", __doc__, {"": (CalibrateRequest, run)})
main = COMMAND.main
