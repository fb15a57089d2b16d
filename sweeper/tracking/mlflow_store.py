"""Addresses, tags and paging of MLflow stores, shared by all code that writes to a store or reads from it.

Importing MLflow takes seconds, so this module, which the driver and the commands use, does not import it.
"""

import base64
import configparser
import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import socket
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from workloads.api.errors import UserInputError, describe_os_error, first_line
from workloads.api.notices import notify
from workloads.api.secrets import mask

KIND = "sweeper.kind"
STUDY = "sweeper.study"  # the id of the sweep's Optuna study, because sweep names are not unique
TRIAL_NUMBER = "sweeper.trial"
STARTED_AT = "sweeper.started_at"  # the start time of the command that created the parent run
WRITTEN = "sweeper.written"  # of a parent run: the number of leading trials that have ended and are written
RESULTS = "sweeper.results"  # of a parent run, as JSON: the results last written, and whether they are complete
CONTENT = "sweeper.content"  # the digest of an imported file

SWEEP_KIND = "sweep"  # the parent run of a sweep
TRIAL_KIND = "trial"  # a child run of a sweep
IMPORT_KIND = "import"  # the parent run of an imported file
IMPORTED_KIND = "imported"  # a child run of an imported file, with one result
ACCEPTANCE_KIND = "acceptance"  # the run of an acceptance test

# Tags that appear as columns on the store's pages.
SWEEP_NAME = "sweep"
OUTCOME = "outcome"
FRONT = "front"  # "yes" for a trial on the front of several objectives, else absent; as a metric, 1 or 0
FRONT_SHARE = "front_share"  # a metric of a remeasured point on the front
FRONT_VERDICT = "front_verdict"  # of a remeasured point: on the front, dominated, not sure, or the exceeded limit
SAME_AS = "same_as"  # of a remeasured point: the trials that do not differ from the point significantly
EXCEEDED = "exceeded"  # of a finalist: the limits that the median over the rounds exceeds
OBJECTIVES = "objectives"  # of a sweep, as JSON: the directions by metric. Before 0.3, only of several objectives
REFUSED = "not_written"  # of a trial: why MLflow rejects the values
LIMITS = "limits"  # of a sweep, as JSON: bound and direction by metric (in earlier versions, only the bound)
WORK = "work"  # the identity of a trial's work, as JSON
REMEASURED_TRIAL = "remeasured_trial"  # of a trial in the finals: the finalist's number
RETRIED_AS = "retried_as"  # of the attempt that does not count: the number of the other attempt, usually the retry
# Runs with these tags do not count as trials. Reports and views leave them out.
LEFT_OUT = (REMEASURED_TRIAL, RETRIED_AS)

# Tags that MLflow defines.
PARENT_RUN = "mlflow.parentRunId"
DESCRIPTION = "mlflow.note.content"

# Environment variables that MLflow's client uses for authentication.
USERNAME, PASSWORD, TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"

PAGE_SIZE = 5000
ANSWER_TIMEOUT_S = 15.0  # on two busy cores, a server with eight sweeps took more than 5 s
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
SQLITE_PREFIX = "sqlite:///"
ARTIFACTS = "mlruns"  # the folder for artifacts next to a SQLite file
REVISION = "SELECT version_num FROM alembic_version"  # reads the revision of MLflow's tables
SQLITE_MAGIC = b"SQLite format 3\0"  # the first bytes of a SQLite file


def default_uri(directory: Path) -> str:
    """Return the address of a results directory's store, which is a SQLite file."""
    return sqlite_uri(directory.resolve() / "mlflow.db")


def sqlite_uri(file: Path) -> str:
    """Return the address of a SQLite file, encoded because SQLAlchemy decodes it and reads options after a `?`. MLflow
    creates a folder for `sqlite:///` without decoding the address. Naming a driver in the address avoids this."""
    try:
        quoted = urllib.parse.quote(str(file))
    except UnicodeEncodeError as error:
        problem = f"dir={os.fsencode(file.parent)!r}: is not text in this locale"
        raise UserInputError(f"{problem}; set PYTHONUTF8=1, or choose another folder") from error
    return SQLITE_PREFIX + quoted if quoted == str(file) else f"sqlite+pysqlite:///{quoted}"


def sqlite_path(uri: str) -> Path | None:
    """Return the file that SQLAlchemy opens for a SQLite address, or None for any other address."""
    scheme, separator, path = uri.partition(":///")
    is_sqlite = separator and scheme.split("+")[0] == "sqlite"
    return Path(urllib.parse.unquote(path.partition("?")[0])) if is_sqlite else None


def check_uri(uri: str, option: str = "tracking.uri=") -> None:
    """Check that an address is valid and that the store can be reached. `option` precedes the address in messages.

    Raises UserInputError if the address is invalid, if nothing responds, or if the SQLite file cannot be written.
    """
    shown = f"{option}{mask(uri)}"
    try:
        parts = urllib.parse.urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserInputError(f"{shown}: not a valid address") from error
    scheme = parts.scheme.split("+")[0]
    if file := sqlite_path(uri):
        written = filter(Path.exists, (file, file.parent / ARTIFACTS))
        for path in (path for path in (file.parent, *written) if not os.access(path, os.W_OK)):
            raise UserInputError(f"{shown}: {path} cannot be written")
        if reason := find_damage(file):
            raise UserInputError(f"{shown}: {reason}")
        return
    if scheme not in ("http", "https", *DATABASE_PORTS) or not host:
        allowed = "http://host:port, or a database such as sqlite:///mlflow.db"
        raise UserInputError(f"{shown}: not the address of an MLflow store. Allowed: {allowed}")
    try:
        if scheme in DATABASE_PORTS:
            socket.create_connection((host, port or DATABASE_PORTS[scheme]), timeout=5).close()
            if reason := _find_database_problem(uri):
                raise UserInputError(f"{shown}: {reason}")
        else:
            _request(parts, "/health").close()
            _request(parts, "/version").close()  # unlike /health, /version requires a password if the server has users
    except urllib.error.HTTPError as error:
        # MLflow's client may authenticate through a plugin that this check cannot use.
        has_plugin = any(os.environ.get(name) for name in ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"))
        has_plugin = has_plugin or bool(importlib.metadata.entry_points(group="mlflow.request_header_provider"))
        if error.code == 401 and not has_plugin:
            reason = f"the server requires a user and a password. Set {USERNAME} and {PASSWORD}"
            if user := _find_credentials(parts)[0]:
                reason = f"the server refuses user {user} with this password. Set {USERNAME} and {PASSWORD}"
            elif os.environ.get(TOKEN):
                reason = f"the server refuses the token in {TOKEN}"
            raise UserInputError(f"{shown}: {reason}") from error
        proxy = _describe_proxy(parts)
        if error.code == 404 and not _serves_api(parts):
            raise UserInputError(f"{shown}: no MLflow server responds there (status 404){proxy}") from error
        if error.code >= 500 or (proxy and error.code in (403, 407)):
            raise UserInputError(f"{shown}: the server responds with status {error.code}{proxy}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = f"nothing responds there ({getattr(error, 'reason', error)})"
        raise UserInputError(f"{shown}: {reason}{_describe_proxy(parts)}") from error


def check_default_store(folder: Path) -> None:
    """Raise UserInputError if MLflow cannot use a directory's SQLite file or artifact folder."""
    default_uri(folder)  # raises if the folder name cannot be encoded
    file = folder / "mlflow.db"
    if reason := find_damage(file):
        raise UserInputError(f"dir={folder}: {file.name}: {reason}; move it away, or set tracking.uri")
    for path in (path for path in (file, folder / ARTIFACTS) if path.exists() and not os.access(path, os.W_OK)):
        raise UserInputError(f"dir={folder}: {path.name}: cannot be written; set dir or tracking.uri")
    name_ignored_store(folder)


def find_damage(file: Path) -> str:
    """Return why MLflow cannot use a file as its SQLite store, or "" if it can or the file is empty or missing."""
    if file.is_dir():
        return "is a directory, and no SQLite database"
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(SQLITE_MAGIC))
    except OSError as error:
        return "" if isinstance(error, FileNotFoundError) else describe_os_error(error)
    if begin not in (b"", SQLITE_MAGIC):
        return "is not a SQLite database"
    return _find_other_schema(file) if begin else ""


def _find_other_schema(file: Path) -> str:
    with (
        contextlib.suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as db,
    ):
        for (revision,) in db.execute(REVISION):
            return _describe_schema(revision, sqlite_uri(file))
    return ""


def _find_database_problem(uri: str) -> str:
    import sqlalchemy  # this import takes as long as the rest of the check

    connection_s = {"connect_timeout": int(ANSWER_TIMEOUT_S)} if uri.startswith(("postgresql", "mysql")) else {}
    try:
        with sqlalchemy.create_engine(uri, connect_args=connection_s).connect() as connection:
            if not sqlalchemy.inspect(connection).has_table("alembic_version"):
                return ""  # MLflow will create the tables
            revision = connection.execute(sqlalchemy.text(REVISION)).scalar()
            connection.execute(sqlalchemy.text("UPDATE experiments SET name = name WHERE 1 = 0"))
            connection.rollback()
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        return mask(first_line(getattr(error, "orig", None) or error))
    return _describe_schema(str(revision), uri)


def _describe_schema(revision: str, uri: str) -> str:
    found = importlib.util.find_spec("mlflow")  # does not import MLflow
    assert found is not None and found.origin
    migrations = list((Path(found.origin).parent / "store/db_migrations/versions").glob("*_*.py"))
    version = importlib.metadata.version("mlflow")
    if revision not in {file.name.partition("_")[0] for file in migrations}:
        return f"was written by a newer MLflow than {version} ({revision})"
    if any(f'down_revision = "{revision}"' in file.read_text() for file in migrations):
        upgrade = f"`mlflow db upgrade {mask(uri)}` changes it permanently: copy it before"
        return f"was written by an older MLflow than {version} ({revision}); {upgrade}"
    return ""


def name_ignored_store(folder: Path) -> None:
    """Print a note if MLFLOW_TRACKING_URI is set, because this variable does not select the store."""
    if ignored := os.environ.get("MLFLOW_TRACKING_URI"):
        remedy = f"the store is {folder / 'mlflow.db'}; set tracking.uri= for another one"
        notify(f"sweeper: MLFLOW_TRACKING_URI={mask(ignored)}: is not used: {remedy}")


def _describe_proxy(parts: urllib.parse.SplitResult) -> str:
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return ""
    return f", through {parts.scheme}_proxy={mask(proxy)}; set no_proxy={parts.hostname} to go around it"


def _serves_api(parts: urllib.parse.SplitResult) -> bool:
    """Return whether MLflow's API responds, for servers that lack /health and /version."""
    try:
        _request(parts, "/api/2.0/mlflow/experiments/search?max_results=1").close()
    except urllib.error.HTTPError as error:
        return error.code != 404
    return True


def _request(parts: urllib.parse.SplitResult, path: str) -> Any:
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + path)
    request = urllib.request.Request(address.geturl())
    user, password = _find_credentials(parts)
    if user:
        credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    elif token := os.environ.get(TOKEN):
        request.add_header("Authorization", f"Bearer {token}")
    return urllib.request.build_opener().open(request, timeout=ANSWER_TIMEOUT_S)  # urlopen keeps its first proxies


def _find_credentials(parts: urllib.parse.SplitResult) -> tuple[str, str]:
    if parts.username:
        return parts.username, parts.password or ""
    file = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, ValueError):
        file.read(Path.home() / ".mlflow" / "credentials")
    user = os.environ.get(USERNAME) or file.get("mlflow", USERNAME, fallback=None)
    password = os.environ.get(PASSWORD) or file.get("mlflow", PASSWORD, fallback=None)
    return (user, password) if user and password else ("", "")


def read_version(uri: str) -> str:
    """Return the version of the MLflow server or, without a server, of the installed MLflow ("" if unknown)."""
    if not uri.startswith("http"):
        return importlib.metadata.version("mlflow")
    try:
        with _request(urllib.parse.urlsplit(uri), "/version") as response:
            return str(response.read(100).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return ""


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return an MLflow filter for runs that have all of these tags."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def search_runs(
    client: Any, experiment_ids: Sequence[str], tags: Mapping[str, str], page_size: int = PAGE_SIZE
) -> Iterator[Any]:
    """Yield the runs that have all of these tags, page by page. `client` is an `mlflow.MlflowClient`."""
    token = None
    while True:
        page = client.search_runs(list(experiment_ids), tag_filter(tags), max_results=page_size, page_token=token)
        yield from page
        if not (token := page.token):
            return
