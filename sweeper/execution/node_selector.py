"""Select nodes by Ray's labels: as few characters as possible, since Ray's head keeps them for each waiting worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

NODE_ID, ACCELERATOR_TYPE = "ray.io/node-id", "ray.io/accelerator-type"
# So many ids (912 characters) cost little, and no node that joins later matches them.
MAX_IDS = 16


def select_nodes(ids: Collection[str], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a label selector that matches these nodes and no others of the cluster.

    With many ids, it is the type of their accelerators without the ids of other nodes that have it, where that is
    shorter. Ray's type does not tell an H100 from an H100 PCIe, and drained nodes have it too. A node of this type that
    joins later matches.

    Args:
        ids: Ray's ids of the nodes; none on this machine alone.
        entries: all nodes of the cluster, as `ray.nodes` returns them.
    """
    if not ids:
        return {}
    by_id = {NODE_ID: f"in({','.join(sorted(ids))})"}
    type_of = {entry["NodeID"]: entry["Labels"].get(ACCELERATOR_TYPE) for entry in entries if entry["Alive"]}
    types = {type_of.get(node_id) for node_id in ids if node_id in type_of}
    if len(ids) <= MAX_IDS or len(types) != 1 or None in types:
        return by_id
    by_type = {ACCELERATOR_TYPE: str(*types)}
    if others := sorted(node_id for node_id, kind in type_of.items() if kind in types and node_id not in ids):
        by_type[NODE_ID] = f"!in({','.join(others)})"
    return min(by_type, by_id, key=lambda selector: sum(map(len, selector.values())))
