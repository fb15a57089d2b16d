"""What a plan proposes for a trainer can be written for that trainer; anything else is refused before the search."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.commands.plan.answer import search
from sweeper.commands.plan.request import build_problem, read_request
from tests.conftest import examples
from workloads.api.errors import UserInputError
from workloads.formats.files import FORMATS, find_obstacle, render
from workloads.layouts.layout import write_words
from workloads.layouts.trainers import TRAINERS

MODELS = ["llama3_8b", "llama3_405b", "qwen3_4b", "qwen3_8b", "qwen3_30b_a3b", "mixtral_8x7b", "megatron_22b"]
MODELS += ["deepseek_v2_lite", "qwen2_5_14b"]
GIVEN = {
    "pp": [2, 4],
    "ep": [4, 8],
    "dp_replicate": [2],
    "cp": [2],
    "schedule": ["1f1b", "interleaved"],
    "first_stage_less_layers": [1],
    "last_stage_less_layers": [0, 2],
    "tp_overlap": ["async"],
    "reshard_after_forward": [False],
    "sequence_length": [2048],
    "precision": ["fp32"],
}


@pytest.mark.parametrize("trainer", FORMATS)
def test_what_is_proposed_for_a_trainer_can_be_written(trainer: str) -> None:
    outcomes = Counter[str]()
    of_trainer = {name: TRAINERS[trainer].runs[name] for name in ("state", "sharding", "checkpointing")}
    fields = {name: st.sampled_from(values) for name, values in (GIVEN | of_trainer).items()}

    @settings(examples(40))
    @given(st.sampled_from(MODELS), st.sampled_from([1, 8, 24, 64]), st.fixed_dictionaries({}, optional=fields))
    def check(model: str, gpus: int, fixed: dict[str, object]) -> None:
        words = [f"model={model}", f"gpus={gpus}", "hardware=b300", f"trainer={trainer}", *write_words(fixed).split()]
        try:
            problem = build_problem(read_request(words))
            refusal = find_obstacle(problem.job, problem.given, trainer)
            best = () if refusal else search(problem).best
        except UserInputError as error:
            refusal, best = str(error), ()
        assert "\n" not in refusal and bool(refusal) != bool(best)
        outcomes["refused" if refusal else "planned"] += 1
        for candidate in best:
            render(replace(problem.job, layout=candidate.layout), gpus, trainer)

    check()
    assert min(outcomes["refused"], outcomes["planned"]) >= 3
