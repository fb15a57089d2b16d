"""From trials to rates: products, attention, copies and links, as plans read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sweeper.commands.calibrate import rates
from sweeper.commands.calibrate.rates import measured_topology
from sweeper.preflight.calibration import Calibration, Figure, calibrate_device
from tests.support.calibrations import attention_rows, collective_rows, product_rows
from tests.support.planner import H100
from workloads.estimator.communication import Group, all_gather_s, latency_s
from workloads.estimator.operations import attention_rates
from workloads.hardware.cluster import Cluster, Topology

ASSUMED = Topology("nodes of 8", 8, "switch", link_gb_s=450, network_gb_s=50)


def test_the_rate_of_products_is_all_operations_over_all_time() -> None:
    rows = product_rows()
    rows[0]["tflops_sustained"] = "300"  # the smallest of the three takes twice as long
    operations = [2 * m * n * k for m, n, k in ((8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336))]
    seconds = operations[0] / 300 + (operations[1] + operations[2]) / 600
    tflops = rates.sustained_tflops([*rows, *product_rows("fp8_tensorwise", 1300)])
    assert tflops["bf16"].value == pytest.approx(sum(operations) / seconds)
    assert tflops["fp8"] == Figure(pytest.approx(1300), pytest.approx(1294), pytest.approx(1306))


def test_a_rate_without_an_interval_has_none() -> None:
    rows = product_rows()
    rows[1]["tflops_sustained_ci_low"] = ""
    rate = rates.sustained_tflops(rows)["bf16"]
    assert rate.low is None and rate.high is not None


def test_short_products_are_faster_by_the_headroom_of_bf16() -> None:
    assert rates.power_headroom([*product_rows(), *product_rows("fp8_tensorwise", 1300, 1400)]) == pytest.approx(1.2)
    assert rates.power_headroom(product_rows(burst=590)) == 1.0  # never slower


def test_the_planner_gives_attention_its_measured_rate_at_both_lengths() -> None:
    rows = [*attention_rows("cudnn", 620, 540), *attention_rows("flash4", 650, 560, 1200)]
    attention = rates.attention_rates(rows, 600.0)
    calibration = Calibration("h100", "H100", "2026-11-23", sustained_tflops={"bf16": Figure(600)}, attention=attention)
    device = calibrate_device(H100, calibration)
    for row in rows:
        kernel = {"cudnn": "cudnn", "flash4": "flash3"}[row["param.kernel"]]
        fitted, length = attention_rates(device, kernel), float(row["param.sequence_length"])
        share = fitted.forward_share if row["param.mode"] == "forward" else fitted.backward_share
        rate = device.sustained_tflops["bf16"] * share * length / (length + fitted.half_tokens)
        assert rate == pytest.approx(float(row["tflops_sustained"]), rel=1e-3)


def test_of_kernels_with_one_name_the_fastest_counts_and_one_length_gives_no_rate() -> None:
    rows = [*attention_rows("aotriton", 300, 200), *attention_rows("ck", 400, 250)]
    assert rates.attention_rates(rows, 500.0)["flash2"].forward_share == pytest.approx(0.8, rel=1e-3)
    assert rates.attention_rates(attention_rows("cudnn", 600, 500)[::2], 600.0) == {}
    forward = [row for row in attention_rows("cudnn", 600, 500) if row["param.mode"] == "forward"]
    assert rates.attention_rates(forward, 600.0) == {}


def test_the_conditions_name_seconds_clock_and_power() -> None:
    assert rates.describe_conditions(product_rows()) == (
        "products back to back for 2 s, after 1.4 to 1.4 s in which the clocks settled, 1440 to 1440 MHz, 700 to 700 W"
    )


def test_the_planner_s_all_gather_takes_the_measured_time_within_a_node_and_across() -> None:
    rows = collective_rows({0: 180.0, 8: 360.0, 2: 340.0}, 16)
    topology = measured_topology(rows, ASSUMED, gpus=16, per_node=8)
    assert (topology.gpus_per_domain, topology.wiring) == (8, "switch")
    cluster = Cluster(H100, topology, 16)
    for ranks, bus in ((8, 360e9), (16, 180e9)):
        moving_s = all_gather_s(cluster, Group(ranks), 2**30) - latency_s(cluster, Group(ranks))
        assert moving_s == pytest.approx(2**30 * (ranks - 1) / ranks / bus, rel=1e-3)
    assert 7 * topology.link_latency_s == pytest.approx(28e-6, rel=1e-3)


def test_links_between_pairs_are_told_by_the_bandwidth_of_two() -> None:
    rows = collective_rows({0: 320.0, 2: 48.0}, 8)
    assert measured_topology(rows, ASSUMED, gpus=8, per_node=8).wiring == "pairs"


def test_what_was_not_measured_is_as_assumed() -> None:
    topology = measured_topology(collective_rows({0: 360.0}, 8), ASSUMED, gpus=8, per_node=8)
    assert topology.network_gb_s == 50 and topology.network_latency_s == ASSUMED.network_latency_s
    single = measured_topology([], replace(ASSUMED, oversubscription=2.0), gpus=2, per_node=1)
    assert (single.link_gb_s, single.network_gb_s, single.oversubscription) == (450, 50, 2.0)
