"""Feed configurations to the parsers of the trainers themselves. Runs under an interpreter that has the trainers:

    python tests/support/trainer_parsers.py torchtitan torchtitan.toml
    MEGATRON_LM=/path/to/Megatron-LM python tests/support/trainer_parsers.py megatron megatron.sh

It gives each file to the parser and prints a line of JSON for it: what the trainer made of it, or why it refused it. No
trainer is started.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any


def parse_torchtitan(path: Path) -> dict[str, Any]:
    """Parse a TOML file as `python -m torchtitan.train` does, and make its parallel dimensions and stages."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    config = ConfigManager().parse_args([f"--job.config_file={path}"])
    parallelism = config.parallelism
    degrees = {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
    }
    world_size = _read_world_size(path.read_text())
    ParallelDims(
        **degrees,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=world_size,
    )
    model = get_train_spec(config.model.name).model_args[config.model.flavor]
    stages = _count_torchtitan_stages(config, model.n_layers) if degrees["pp"] > 1 else 1
    return degrees | {"layers": model.n_layers, "stages": stages, "checkpointing": config.activation_checkpoint.mode}


def _count_torchtitan_stages(config: Any, layers: int) -> int:
    """Return the stages that torchtitan divides the model into, by the function with which it names their layers."""
    import math

    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    parallelism = config.parallelism
    get_schedule_class(parallelism.pipeline_parallel_schedule)
    ends = (parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers)
    stages = math.ceil((layers + sum(ends)) / parallelism.pipeline_parallel_layers_per_stage)
    return len(generate_llm_fqn_per_model_part(stages, layers, *ends))


def parse_megatron(path: Path) -> dict[str, Any]:
    """Parse the arguments of a script as `pretrain_gpt.py` does, check them, and make megatron-core's configuration."""
    words = shlex.split(path.read_text().replace("\\\n", " "), comments=True)
    for name, value in re.findall(r"export (\w+)=(\S+)", path.read_text()):
        os.environ[name] = value
    os.environ |= {"WORLD_SIZE": str(_read_world_size(path.read_text())), "RANK": "0"}
    sys.path.append(os.environ["MEGATRON_LM"])  # behind the installed megatron-core
    _stand_in_for_a_gpu()
    _stand_in_for_transformer_engine()
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    sys.argv = words[words.index("pretrain_gpt.py") :]
    args = parse_args()
    validate_args(args)
    config = core_transformer_config_from_args(args)
    import megatron.core

    return {
        "megatron_core": megatron.core.__file__,
        "dp": args.data_parallel_size,
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "cp": config.context_parallel_size,
        "layers": config.num_layers,
        "stages": config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1),
        "recompute_granularity": config.recompute_granularity,
    }


def _stand_in_for_a_gpu() -> None:
    """Make torch describe an H100 (compute capability 9.0) where there is no GPU: `validate_args` asks for it alone."""
    import torch

    if torch.cuda.is_available():
        return
    properties = type("Properties", (), {"major": 9, "minor": 0, "name": "stand-in for an H100"})()
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def _stand_in_for_transformer_engine() -> None:
    """Make megatron-core see version 2.9 of Transformer Engine, which is built for NVIDIA GPUs, if it is not there."""
    from importlib.util import find_spec

    if find_spec("transformer_engine"):
        return
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from packaging.version import Version

    utils._te_version = Version("2.9.0")
    rope_utils.fused_apply_rotary_pos_emb = object()  # megatron-core asks whether it is there


def _read_world_size(text: str) -> int:
    launch = dict(re.findall(r"--(nnodes|nproc-per-node)=(\d+)", text))
    return int(launch["nnodes"]) * int(launch["nproc-per-node"])


PARSERS = {"torchtitan": parse_torchtitan, "megatron": parse_megatron}


def main() -> None:
    """Print a line for each file."""
    trainer, *paths = sys.argv[1:]
    for path in paths:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                verdict = {"accepted": PARSERS[trainer](Path(path))}
            except (Exception, SystemExit) as error:
                verdict = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(verdict))


if __name__ == "__main__":
    main()
