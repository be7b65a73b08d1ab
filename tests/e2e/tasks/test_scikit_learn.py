"""Models of scikit-learn as their users serve them: converted to ONNX, in a folder of bare files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as over_http
from tests.e2e.tasks.served import AT_ONCE, Served, at_once, serving_repository

from forebay.cli.repository.demos import tabular

for each in ("onnxruntime", "onnx", "sklearn", "skl2onnx"):
    pytest.importorskip(each)

RANK, CANDIDATES, BEST = 24, 50, 5
TOLERANCE = 1e-5
"""Scikit-learn computes in double precision, ONNX Runtime in single."""


class Known:
    """What scikit-learn itself says."""

    def __init__(self) -> None:
        from sklearn.datasets import load_breast_cancer
        from sklearn.decomposition import TruncatedSVD
        from sklearn.ensemble import GradientBoostingClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rows, tumours = load_breast_cancer(return_X_y=True)
        self.rows = rows.astype(np.float32)
        boosted = GradientBoostingClassifier(n_estimators=30, random_state=0)
        self.classifier = make_pipeline(StandardScaler(), boosted).fit(self.rows, tumours)
        used = tabular.interactions()
        factors = TruncatedSVD(RANK, random_state=0).fit(used)
        self.users: np.ndarray[Any, Any] = factors.transform(used)
        self.items: np.ndarray[Any, Any] = factors.components_.T

    def write(self, folder: Path) -> None:
        """The classifier and the recommender as ONNX files."""
        from skl2onnx import to_onnx

        folder.mkdir()
        made = to_onnx(self.classifier, self.rows[:1], options={"zipmap": False})
        (folder / "tumour.onnx").write_bytes(made.SerializeToString())
        (folder / "recommend.onnx").write_bytes(self._recommender())

    def _recommender(self) -> bytes:
        """Gathers the vectors of a user and of candidates, scores these, and gives the places of the best ones."""
        from onnx import TensorProto, checker, helper, numpy_helper

        node, info = helper.make_node, helper.make_tensor_value_info
        constants = {"users": self.users, "items": self.items}
        kept = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
        kept += [numpy_helper.from_array(np.array([value]), name) for name, value in (("best", BEST), ("last", 2))]
        graph = helper.make_graph(
            [
                node("Gather", ["users", "USER"], ["user"]),
                node("Gather", ["items", "CANDIDATE"], ["candidates"]),
                node("Mul", ["user", "candidates"], ["products"]),
                node("ReduceSum", ["products", "last"], ["scores"], keepdims=0),
                node("TopK", ["scores", "best"], ["SCORE", "PLACE"], axis=1),
            ],
            "recommend",
            [info(name, TensorProto.INT64, ["batch", n]) for name, n in (("USER", 1), ("CANDIDATE", CANDIDATES))],
            [
                info("SCORE", TensorProto.FLOAT, ["batch", BEST]),
                info("PLACE", TensorProto.INT64, ["batch", BEST]),
            ],
            kept,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        checker.check_model(model)
        return bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


@pytest.fixture(scope="module")
def served(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = Path(tmp_path_factory.mktemp("scikit"))
    known.write(folder / "models")
    with serving_repository(folder, folder / "models") as served:
        yield served


def ask(served: Served, model: str, **given: "np.ndarray[Any, Any]") -> Any:
    inputs = []
    for name, array in given.items():
        inputs.append(over_http.InferInput(name, list(array.shape), "INT64" if array.dtype == np.int64 else "FP32"))
        inputs[-1].set_data_from_numpy(array)
    with over_http.InferenceServerClient(served.url.removeprefix("http://")) as client:
        return client.infer(model, inputs)


def test_pipeline_of_scikit_learn_gives_the_same_classes_and_probabilities(served: Served, known: Known) -> None:
    parts = np.array_split(known.rows, AT_ONCE * 20)
    answers = at_once(lambda i: [ask(served, "tumour", X=part) for part in parts[i::AT_ONCE]])
    found = {i + AT_ONCE * n: answer for i, several in enumerate(answers) for n, answer in enumerate(several)}
    for place, part in enumerate(parts):
        chances = found[place].as_numpy("probabilities")
        assert np.abs(chances - known.classifier.predict_proba(part)).max() < TOLERANCE
        assert found[place].as_numpy("label").ravel().tolist() == known.classifier.predict(part).tolist()


def test_recommender_of_scikit_learn_ranks_candidates_as_its_factors_do(served: Served, known: Known) -> None:
    rng = np.random.default_rng(1)

    def compare(seed: int) -> None:
        user = np.array([[seed * 31 % tabular.USERS]])
        candidates = picked[seed][None]
        answer = ask(served, "recommend", USER=user, CANDIDATE=candidates)
        scores = (known.users[user[0]] @ known.items[candidates[0]].T)[0]
        best = np.sort(scores)[::-1][:BEST]
        assert np.abs(answer.as_numpy("SCORE")[0] - best).max() < TOLERANCE
        assert np.abs(scores[answer.as_numpy("PLACE")[0]] - best).max() < TOLERANCE

    picked = [rng.choice(tabular.ITEMS, CANDIDATES, replace=False) for _ in range(100)]
    at_once(lambda i: [compare(seed) for seed in range(i, 100, AT_ONCE)])
