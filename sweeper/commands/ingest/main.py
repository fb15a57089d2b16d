"""Import the results of other tools.

    python -m sweeper ingest train.log results/ device=h100
    python -m sweeper ingest train.log --check

Supported formats: tprimat benchmarks (JSON, both generations), ml_dataflow results (CSV of 19 or 21 columns), and logs
of Megatron-LM, Megatron-DeepSpeed, Primus, Megatron-Bridge, NeMo, NeMo Automodel, torchtitan, nanotron, nanochat,
GPT-NeoX, OLMo-core, llm-foundry and DeepSpeed. PATH is a file or a folder. The command tries to import all files in a
folder and prints the reason for each file that cannot be imported.

Each file becomes an MLflow run in a separate experiment, with the file attached and a child run for each result.
Metrics are recomputed from tokens and step times. The tool's own values are stored as claimed_…, and inconsistencies
within a file are reported. Importing the same file again changes nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sweeper.cli.command import StoreRequest, Subcommand, Tracking, switch, words
from sweeper.commands.ingest import imported
from sweeper.commands.ingest.imported import ImportedResult, derive_metrics
from sweeper.commands.ingest.readers import detect_format
from sweeper.common.format import count, format_number, printable
from sweeper.config.catalogue import catalogue
from workloads.api.errors import UserInputError
from workloads.models.hugging_face import UnsupportedModel, load_model
from workloads.models.model import MODELS, Model
from workloads.suggestions import suggest

SHOWN_MESSAGES = 5  # number of messages printed per file; the report shows all messages


@dataclass(frozen=True)
class ImportTracking(Tracking):
    """The MLflow store and experiment for imported results.

    Attributes:
        uri: the MLflow store; by default the store in `dir`.
        experiment: the MLflow experiment for imported results.
    """

    experiment: str = "imported"


@dataclass(frozen=True, kw_only=True)
class IngestRequest(StoreRequest):
    """The files to import.

    Attributes:
        device: device of results whose file names none, as in hardware=; by default taken from the file's own name.
        model: model of results whose file names none, as in `plan`: a name or a config.json.
        check: read and report, but write nothing.
    """

    paths: list[str] = field(default_factory=list, metadata=words("PATH", least=1))
    tracking: ImportTracking = field(default_factory=ImportTracking)
    device: str = ""
    model: str = ""
    check: bool = switch()


def import_paths(request: IngestRequest) -> int:
    """Import each file and print a summary. Return 2 if a file named in the command cannot be imported."""
    from sweeper.tracking.mlflow_store import find_damage, sqlite_path

    uri = None if request.check else request.open_uri()
    if uri and (file := sqlite_path(uri)) and file.exists() and (reason := find_damage(file)):
        raise UserInputError(f"{file}: {reason}")
    if request.device and imported.get_hardware(request.device) is None:
        raise UserInputError(f"device={request.device}: unknown device. {suggest(request.device, catalogue())}")
    try:
        model = load_model(request.model) if request.model else None
    except UnsupportedModel as error:
        raise UserInputError(f"model={request.model}: {error}") from error
    accepted, refused, named_refused = 0, 0, 0
    for path in map(Path, request.paths):
        for file in list_files(path):
            try:
                print(printable(import_file(file, uri, request.tracking.experiment, request.device, model)), flush=True)
                accepted += 1
            except UserInputError as error:
                refused += 1
                named_refused += file == path
                print(f"refused: {printable(str(error))}", file=sys.stderr if file == path else sys.stdout, flush=True)
    if accepted + refused > 1:
        done = "read" if request.check else "imported"
        print(f"{count(accepted + refused, 'file')}: {accepted} {done}, {refused} refused")
    if not accepted:
        raise UserInputError("no file could be imported")
    return 2 if named_refused else 0


def list_files(path: Path) -> list[Path]:
    """Return the path of a file, or all visible files below a folder in sorted order."""
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def import_file(path: Path, uri: str | None, experiment: str, device: str = "", model: Model | None = None) -> str:
    """Read the whole file, then write the results to the store at `uri`, if given. Return a summary for the terminal.

    Raises UserInputError and writes nothing if the file has an unsupported format, is damaged or has no result.
    """
    file_format = detect_format(path)
    results = [imported.add_device(result, path, device) for result in file_format.read(path)]
    results = [_add_model(result, model) for result in results]
    if not results:
        raise UserInputError(f"{path}: has no result")
    program = results[0].machine_info.get("program")
    summary = [f"{path}: {f'log of {program}' if program else file_format.name}", *_summarize(results)]
    if uri is not None:
        from sweeper.commands.ingest import write  # MLflow takes seconds to import

        settings = {"format": file_format.name, "device": device, "model": repr(model) if model else ""}
        summary.append(write.write(uri, experiment, path, settings, results))
    messages = [
        f"contradiction in {result.name}: {contradiction}"
        for result in results
        for contradiction in imported.find_contradictions(result, derive_metrics(result))
    ]
    messages += [f"note: {note}" for note in dict.fromkeys(note for result in results for note in result.notes)]
    shown = messages if uri is None else messages[:SHOWN_MESSAGES]
    if more := len(messages) - len(shown):
        shown.append(f"… and {more:,} more: all are in the report and, with --check, here")
    return "\n  ".join(["; ".join(summary), *shown])


def _add_model(result: ImportedResult, model: Model | None) -> ImportedResult:
    """Add the model given to the command if the file names none, or a note if the file names another."""
    params, named = result.params, result.model or MODELS.get(str(result.params.get("model", "")))
    known = next((name for name, sizes in MODELS.items() if sizes == (named or model)), "")
    if known and not params.get("model"):
        params = {**params, "model": known}
    other = "model= is ignored: the file has another model"
    notes = (*result.notes, *([other] if model and named and named != model else []))
    return replace(result, params=params, model=result.model or (None if named else model), notes=notes)


def _summarize(results: Sequence[ImportedResult]) -> list[str]:
    parts = [count(len(results), "result")]
    if len(results) == 1 and (derived := derive_metrics(results[0])):
        rate = f", {format_number(derived['tokens_per_s'])} tokens/s" if "tokens_per_s" in derived else ""
        rate += f", {format_number(derived['tflops_per_gpu'])} TFLOP/s a GPU" if "tflops_per_gpu" in derived else ""
        rate += f", MFU {derived['mfu']:.1%}" if "mfu" in derived else ""
        parts.append(f"{format_number(derived['step_time_ms'])} ms a step{rate}")
    if infeasible := sum(not result.feasible for result in results):
        parts.append(f"{infeasible} of them infeasible")
    if no_rate := sum(result.feasible and not result.tokens_per_step for result in results):
        of_several = f"{no_rate} " if len(results) > 1 else ""
        parts.append(f"{of_several}without tokens/s: the tokens of a step are not known")
    return parts


COMMAND = Subcommand("ingest", __doc__, {"": (IngestRequest, import_paths)})
main = COMMAND.main
