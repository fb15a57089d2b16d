"""A program's claims are compared with its own steps."""

from typing import Any

import pytest

from tests.support.programs import STEPS, run_program
from workloads.api.contract import ProgramFailed
from workloads.command.work import DeclaredWork, find_contradictions, flops_per_token
from workloads.formats.logs import Step

TOKENS = 128 * 2048
WORK = DeclaredWork(128, 2048, "llama3_8b", "bf16", {})


def find(steps: list[dict[str, float]], program: str = "command.log", gpus: int = 8) -> list[str]:
    return find_contradictions([Step(n, metrics) for n, metrics in enumerate(steps)], WORK, TOKENS, 2048, gpus, program)


def make_steps(name: str, claim: float, times_s: tuple[float, ...] = (4.0,) * 9) -> list[dict[str, float]]:
    return [{"step_time_s": time_s, name: claim} for time_s in times_s]


RATE = TOKENS / 4  # tokens/s
NOISY = (3.0, 3.4, 3.6, 3.8, 4.0, 4.4, 5.0, 5.4, 6.0)  # the 10th to 90th percentile: 3.32 to 5.52 s


@pytest.mark.parametrize(
    ("steps", "phrase"),
    [
        (make_steps("tokens_per_s", RATE), ""),
        (make_steps("tokens_per_s", 1.049 * RATE), ""),
        (make_steps("tokens_per_s", 1.2 * RATE), "claims 78,643 tokens/s, its 9 measured steps give 65,536 (+20%)"),
        (make_steps("tokens_per_s_per_gpu", RATE / 8), ""),
        (make_steps("tokens_per_s_per_gpu", RATE), "claims 65,536 tokens/s a GPU, its 9 measured steps give 8,192"),
        (make_steps("tokens_per_s", 1.19 * RATE, NOISY), ""),  # within the steps' own spread
        (make_steps("tokens_per_s", 1.25 * RATE, NOISY), "(+25%)"),
        (make_steps("tokens_per_s", 1.2 * RATE, (4.0,)), "its 1 measured step gives"),
        ([{"tokens_per_s": 1.2 * RATE}], ""),  # the only measurement
        (make_steps("mfu", 0.9), ""),
    ],
)
def test_a_claim_is_compared_with_the_rates_of_the_same_steps(steps: list[dict[str, float]], phrase: str) -> None:
    contradictions = find(steps)
    assert len(contradictions) == bool(phrase) and phrase in "".join(contradictions)


def test_flops_per_token_of_8b_by_convention() -> None:
    """By hand: 32 layers of 4096 x (4096 + 2048 + 4096 + 3 x 14336), a head of 4096 x 128256, six for each weight."""
    weights = 32 * 4096 * (4096 + 2048 + 4096 + 3 * 14336) + 4096 * 128256
    attention = 12 * 32 * 4096 * 2048
    assert flops_per_token("llama3_8b", 2048) == {
        "causal attention": 6 * weights + attention / 2,
        "full attention": 6 * weights + attention,
        "6 per parameter": 6 * 8_030_261_248,
    }


@pytest.mark.parametrize(
    ("program", "convention", "is_contradicted"),
    [
        ("torchtitan", "full attention", False),
        ("torchtitan", "causal attention", True),
        ("Megatron-LM", "causal attention", False),
        ("Megatron-LM", "full attention", False),
        ("command.log", "6 per parameter", False),
    ],
)
def test_tflops_follow_the_convention_of_the_program(program: str, convention: str, is_contradicted: bool) -> None:
    work = DeclaredWork(16, 8192, "llama3_8b", "bf16", {})
    tflops = flops_per_token("llama3_8b", 8192)[convention] * 16 * 8192 / 2.0 / 8 / 1e12
    steps = [Step(n, {"step_time_s": 2.0, "tflops_per_gpu": tflops}) for n in range(9)]
    assert bool(find_contradictions(steps, work, 16 * 8192, 8192, 8, program)) == is_contradicted
    steps = [Step(n, {"step_time_s": 2.0, "tflops_per_gpu": 1.3 * tflops}) for n in range(9)]
    (phrase,) = find_contradictions(steps, work, 16 * 8192, 8192, 8, program)
    assert "TFLOP/s a GPU, its 9 measured steps give" in phrase and "counting" in phrase


CLAIM = {"step_time_ms": r"took (\d+)", "tokens_per_s": r"at (\d+)"}


@pytest.mark.parametrize("claims", ["mark", "fail"])
def test_a_contradicted_claim_is_marked_or_fails_the_trial(claims: str) -> None:
    program = "for _ in range(9): print('took 50 ms at 6144')"
    settings: dict[str, Any] = {"log": CLAIM, "global_batch": "2", "sequence_length": "128", "claims": claims}
    reason = r"the program claims 6,144 tokens/s, its 5 measured steps give 5,120 \(\+20%\)"
    if claims == "fail":
        with pytest.raises(ProgramFailed, match=reason):
            run_program(program, **settings)
        return
    measurement = run_program(program, **settings)
    assert measurement.unranked.startswith("the program claims 6,144 tokens/s")
    assert measurement.metrics["claimed_tokens_per_s"] == 6144 and measurement.step_times_s == (0.05,) * 5
    assert run_program(program.replace("6144", "5300"), **settings).unranked == ""


def test_a_log_of_tokens_per_s_alone_has_a_rate_and_no_steps() -> None:
    program = "for _ in range(9): print('at 5120')"
    log = {"tokens_per_s": r"at (\d+)"}
    alone = run_program(program, log=log)
    assert alone.is_rate and alone.tokens_per_step / alone.step_times_s[0] == pytest.approx(5120)
    assert run_program(program, log=log, global_batch="2", sequence_length="128").step_times_s == (0.05,) * 5


def test_a_claim_of_a_known_trainer_is_compared() -> None:
    """The lines claim 1 TFLOP/s; 256 x 128 tokens of llama_tiny in 50 ms are 1.9."""
    measurement = run_program(STEPS, sequence_length="128", model="llama_tiny")
    assert measurement.unranked.startswith("the program claims 1 TFLOP/s, its 5 measured steps give 1.93")
