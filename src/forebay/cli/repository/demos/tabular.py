"""A recommender: matrix factorisation of user-item interactions, computed here and written as ONNX.

The interactions are synthetic: every user and every item has a taste (its number modulo `TASTES`), and users have
mostly used items of their taste. So it is easy to see whether recommendations make sense.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.cli.repository.demos.writing import DemoModel, Made

USERS: Final = 4000
ITEMS: Final = 2000
TASTES: Final = 20
RANK: Final = 32
BEST: Final = 10
"""Number of recommended items."""
LIKED, OTHER = 0.25, 0.005
"""Probability that a user has used an item of their taste, and any other."""
SEED: Final = 8
POWER_ITERATIONS: Final = 4
SPARE: Final = 8
"""Oversampling: extra directions beyond the rank."""
NEVER: Final = -1e9
"""Score of items that the user has already used."""

Matrix = np.ndarray[Any, Any]


def interactions() -> Matrix:
    """Users x items; 1 where a user has used an item."""
    rng = np.random.default_rng(SEED)
    same = np.arange(USERS)[:, None] % TASTES == np.arange(ITEMS)[None, :] % TASTES
    return (rng.random((USERS, ITEMS)) < np.where(same, LIKED, OTHER)).astype(np.float32)


def factors(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """User and item factors of the best approximation of this rank, by random projection.

    N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", 2011: the randomised range finder
    with power iterations, then the exact decomposition within that range.
    """
    rng = np.random.default_rng(SEED)
    basis, _ = np.linalg.qr(matrix @ rng.standard_normal((matrix.shape[1], rank + SPARE), np.float32))
    for _ in range(POWER_ITERATIONS):
        across, _ = np.linalg.qr(matrix.T @ basis)
        basis, _ = np.linalg.qr(matrix @ across)
    left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    return (basis @ left)[:, :rank] * values[:rank], right[:rank]


def make(target: Path, _: Sequence[Path]) -> None:
    """Write the model: maps a user's number to the best items that they have not used, and their scores.

    A score estimates the probability that the user uses the item. For unknown users it is the item's popularity: row
    `USERS` of the factors is all zeros.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    used = interactions()
    popularity = used.mean(axis=0)
    users, items = factors(used - popularity, RANK)
    none = np.zeros((1, RANK), np.float32), np.zeros((1, ITEMS), np.bool_)
    constants = {
        "users": np.concatenate([users.astype(np.float32), none[0]]),
        "items": items.astype(np.float32),
        "used": np.concatenate([used.astype(np.bool_), none[1]]),
        "popularity": popularity.astype(np.float32),
        "known": np.array(USERS, np.int64),
        "first": np.array(0, np.int64),
        "flat": np.array([-1], np.int64),
        "never": np.array(NEVER, np.float32),
        "best": np.array([BEST], np.int64),
    }
    node = helper.make_node
    graph = helper.make_graph(
        [
            node("Less", ["USER", "known"], ["below"]),
            node("GreaterOrEqual", ["USER", "first"], ["above"]),
            node("And", ["below", "above"], ["is_known"]),
            node("Where", ["is_known", "USER", "known"], ["row_each"]),
            node("Reshape", ["row_each", "flat"], ["row"]),
            node("Gather", ["users", "row"], ["user"]),
            node("Gemm", ["user", "items", "popularity"], ["chance"]),
            node("Gather", ["used", "row"], ["known_items"]),
            node("Where", ["known_items", "never", "chance"], ["fresh"]),
            node("TopK", ["fresh", "best"], ["SCORE", "ITEM"], axis=1),
        ],
        "recommender",
        [helper.make_tensor_value_info("USER", TensorProto.INT64, ["batch", 1])],
        [
            helper.make_tensor_value_info("ITEM", TensorProto.INT64, ["batch", BEST]),
            helper.make_tensor_value_info("SCORE", TensorProto.FLOAT, ["batch", BEST]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString())


MODELS: Final = (
    DemoModel(
        "recommender",
        "",
        f"items for users of invented tastes, by matrix factors ({USERS} users, {ITEMS} items)",
        {"1/model.onnx": Made(make)},
        ("onnxruntime", "onnx"),
        "tabular",
    ),
)
