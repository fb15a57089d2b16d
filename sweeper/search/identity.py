"""The identity of a study: the settings that must be equal for a sweep to be resumed."""

from __future__ import annotations

import uuid
from typing import Any

import optuna

from workloads.api.errors import UserInputError


def check_identity(study: optuna.Study, identity: dict[str, Any]) -> str:
    """Store the identity in a new study, or compare it with the stored one. Return the study's id.

    Raises:
        UserInputError: the study has another identity, or version 0.1 created it.
    """
    attrs = study.user_attrs
    if "id" not in attrs:
        study.set_user_attr("identity", identity)
        study.set_user_attr("id", uuid.uuid4().hex)
        return str(study.user_attrs["id"])
    stored = attrs["identity"]
    if "method" in stored:  # 0.2 calls it benchmark_version
        raise UserInputError(
            "this sweep was created by version 0.1; version 0.2 does not resume it. Choose another name= or dir="
        )
    if stored != identity:
        raise UserInputError(
            f"this sweep already exists with different settings: {'; '.join(describe_differences(stored, identity))}. "
            "Choose another name="
        )
    return str(attrs["id"])


def describe_differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a phrase for each key whose value has changed; a key of a nested mapping is joined by dots."""
    phrases = []
    for key in {**stored, **current}:
        old, new = stored.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += [f"{key}.{phrase}" for phrase in describe_differences(old, new)]
        elif old != new:
            phrases.append(f"{key} was {old}, now {new}")
    return phrases
