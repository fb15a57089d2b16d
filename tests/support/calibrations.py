"""Trials of a calibration, as a sweep writes them to trials.csv: those of a GPU with round rates."""

LAYERS = {"qkv": (8192, 6144, 4096), "gate_up": (8192, 28672, 4096), "down": (8192, 4096, 14336)}


def product_rows(dtype: str = "bf16", sustained: float = 600.0, burst: float = 720.0) -> list[dict[str, str]]:
    """Return the products of a block, which run at these TFLOP/s for long and for a moment."""
    rows = []
    for layer, (m, n, k) in LAYERS.items():
        row = {"param.dtype": dtype, "param.layer": layer, "param.sustained_s": "2.0", "m": m, "n": n, "k": k}
        row |= {"tflops": burst, "tflops_sustained": sustained, "sustained_settling_s": 1.4}
        row |= {"tflops_sustained_ci_low": sustained - 6, "tflops_sustained_ci_high": sustained + 6}
        row |= {"sustained_sm_clock_mhz": 1440, "sustained_power_w": 699.5}
        rows.append({name: str(value) for name, value in row.items()})
    return rows


def grouped_rows(*tflops: float, dtype: str = "bf16") -> list[dict[str, str]]:
    """Return down projections of Qwen3-30B-A3B's experts on one of eight GPUs, at these TFLOP/s."""
    row = {"param.dtype": dtype, "param.model": "qwen3_30b_a3b", "param.layer": "down"}
    row |= {"rows": "65536.0", "experts_held": "16.0"}
    return [row | {"tflops_sustained": str(rate)} for rate in tflops]


def launch_rows(tflops: float) -> list[dict[str, str]]:
    """Return a small GEMM whose launches give it this rate, with an interval of 2% on both sides."""
    bounds = {"tflops_sustained_ci_low": 0.98 * tflops, "tflops_sustained_ci_high": 1.02 * tflops}
    row = {"param.m": 64, "param.n": 64, "param.k": 64, "tflops_sustained": tflops} | bounds
    return [{name: str(value) for name, value in row.items()}]


def copy_rows(gb_per_s: float = 4100.0, operation: str = "copy") -> list[dict[str, str]]:
    row = {"gb_per_s": gb_per_s, "gb_per_s_ci_low": gb_per_s - 10, "gb_per_s_ci_high": gb_per_s + 10}
    return [{"param.operation": operation} | {name: str(value) for name, value in row.items()}]


def attention_rows(kernel: str, forward: float, backward: float, half_tokens: float = 800.0) -> list[dict[str, str]]:
    """Return both passes at two lengths of a kernel that sustains these TFLOP/s over endless sequences."""
    rows = []
    for mode, rate in (("forward", forward), ("backward", backward)):
        for length in (2048, 16384):
            tflops = rate * length / (length + half_tokens)
            row = {"param.kernel": kernel, "param.mode": mode, "param.sequence_length": str(length)}
            rows.append(row | {"tflops_sustained": str(tflops), "tflops": str(1.2 * tflops)})
    return rows


def collective_rows(buses: dict[int, float], ranks_of_all: int, small_ms: float = 0.028) -> list[dict[str, str]]:
    """Return all-gathers of 4 KiB and 1 GiB over groups of these sizes, with the bus GB/s of the large one."""
    rows = []
    for ranks, bus in buses.items():
        size = ranks or ranks_of_all
        large_ms = 2**30 * (size - 1) / size / bus / 1e6
        for kib, step_ms, reached in ((4, small_ms, 0.1), (2**20, large_ms, bus)):
            row = {"param.collective": "all_gather", "param.kib": kib, "param.ranks": ranks}
            row |= {"step_time_ms": step_ms, "bus_gb_s": reached}
            rows.append({name: str(value) for name, value in row.items()})
    return rows
