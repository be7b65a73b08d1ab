"""Measurements as tables, for the README and for the page of all benchmarks."""

import json
from pathlib import Path

import pytest

from forebay.cli.measured import gateway, page
from forebay.cli.measured.tables import figure

MACHINE = {"cpus": 2, "kernel": "6", "python": "3.11"}


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (1.2345, "1.23"), (999.4, "999"), (999.7, "1,000"), (1234.5, "1,234")]
)
def test_figures_have_three_digits_or_are_whole(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_measurements_become_tables_and_missing_ones_are_stated(tmp_path: Path) -> None:
    assert page.NOT_MEASURED in page.benchmarks(tmp_path)

    figures = {
        "forebay": {"request_1k": {"cpu_us": 30.0}},
        "forebay_lean": {"memory": {"stream_kb": 9.5}},
        "nginx": {"request_1k": {"cpu_us": 10.0}, "ttft_random": {"added_p50_us": 250.0}},
    }
    versions = {"forebay": "0.1", "forebay_lean": "0.1", "nginx": "1.2"}
    result = {"machine": MACHINE, "rounds": 3, "versions": versions, "figures": figures}
    write(tmp_path / "gateway/results.json", result)
    path = {
        "bare_tokens_per_s": 60.0, "path_tokens_per_s": 57.0, "ratio": 0.95, "ratio_min": 0.9, "ratio_max": 1.0,
        "ttft_p50_ms": 50.0, "tpot_p50_ms": 16.0,
    }  # fmt: skip
    write(tmp_path / "path/results.json", {"machine": MACHINE, "rounds": 3, "figures": {"chat_8": path}})
    gpu = {
        "bare_per_s": 5000.0, "per_s": 4000.0, "ratio": 0.8, "ratio_min": 0.7, "ratio_max": 0.9, "p50_ms": 2.0,
        "p99_ms": 9.0,
    }  # fmt: skip
    seen = {"machine": {**MACHINE, "gpu": "H0"}, "versions": {"torch": "2"}, "figures": {"image_2_shared": gpu}}
    write(tmp_path / "gpu/results.json", {**seen, "rounds": 3})
    block = page.benchmarks(tmp_path)

    assert "|  | forebay 0.1 | forebay-lean 0.1 | nginx 1.2 |" in block
    assert "| CPU per 1 KB request, µs | **30** | - | 10 |" in block
    assert "| memory per open stream, KB | **-** | 9.5 | - |" in block
    assert "| latency added to the first event, independent streams, p50, µs | **-** | - | 250 |" in block
    assert gateway.IN_STEP in block
    assert "32 KB" not in block, "what nobody was measured at has no row"
    assert "**Goals" not in block
    assert "| chat, concurrency 8 | tokens | 60 | 57 | 0.95 (0.90 to 1.00) |" in block
    assert "| image, 2, in system shared memory | 5,000 | 4,000 | 0.80 (0.70 to 0.90) | 2 | 9 |" in block


def test_goals_are_shown_met_missed_and_not_measured(tmp_path: Path) -> None:
    def goal(most: float, ratio: bool, met: bool | None, *values: float | None) -> dict[str, object]:
        return {
            "goal": "g", "most": most, "ratio": ratio, "met": met,
            "values": dict(zip(("forebay", "forebay_lean"), values, strict=True)),
        }  # fmt: skip

    goals = [
        {**goal(0.35, True, True, 0.3, 0.2), "rounds": [0.3, 0.34, 0.28]},
        goal(1 / 150, True, False, 1 / 70, None),
        goal(10.0, False, None, None, 9.0),
    ]
    result = {"machine": MACHINE, "rounds": 3, "versions": {}, "figures": {}, "goals": goals}
    write(tmp_path / "gateway/results.json", result)
    block = page.benchmarks(tmp_path)

    assert "| g | ≤ 0.35x | 0.30x (0.28x to 0.34x) | 0.20x | yes |" in block
    assert gateway.ROUNDS in block
    assert "| g | ≤ 1/150 | 1/70 | - | **missed** |" in block
    assert "| g | ≤ 10 | - | 9 | not measured |" in block

    later = goal(1.05, True, True, 0.99, 0.98) | {"goal": f"g {gateway.BUILD_BEFORE}"}
    write(tmp_path / "gateway/since.json", {**result, "goals": [*goals, later]})
    block = page.benchmarks(tmp_path)

    assert (
        "| goal | at most | forebay | met |\n| --- | --- | --- | --- |\n| g vs the build before | ≤ 1.05x | " in block
    )


def test_goal_that_a_bare_relay_misses_too_is_marked(tmp_path: Path) -> None:
    def goal(name: str, ours: float, relay: float | None) -> dict[str, object]:
        values = {"forebay": ours, "nginx": relay, "uvloop": 0.5}
        return {"goal": name, "most": 0.7, "ratio": True, "met": ours <= 0.7, "values": values}

    goals = [goal("both", 0.83, 0.74), goal("ours", 0.83, 0.69), goal("theirs", 0.6, 0.74), goal("alone", 0.83, None)]
    delivered = {
        name: {"event_512x5ms": {"delivered": share}} for name, share in (("direct", 0.995), ("nginx", 0.95))
    }
    result = {"machine": MACHINE, "rounds": 3, "versions": {}, "figures": delivered, "goals": goals}
    write(tmp_path / "gateway/results.json", result)
    block = page.benchmarks(tmp_path)

    assert "They also miss: both (nginx 0.74x). " in block
    assert "(best: nginx, 95.0 %)" in block
    assert "Without a proxy" not in block

    delivered["direct"]["event_512x5ms"]["delivered"] = 0.88
    delivered["nginx"]["event_64x1ms"] = {"cpu_us": 10.7}
    there = {**MACHINE, "processor": "Slow One"}
    write(tmp_path / "gateway/elsewhere.json", {**result, "machine": there})
    block = page.benchmarks(tmp_path)

    assert "machine** (2 cores of Slow One, Python 3.11, median of 3 rounds; nginx needs 10.7 µs per" in block
    assert "Without a proxy 88.0 % arrive" in block
    (tmp_path / "gateway/elsewhere.json").unlink()
    delivered["direct"]["event_512x5ms"]["delivered"] = 0.995

    delivered["nginx"]["event_512x5ms"]["delivered"] = 0.99
    write(tmp_path / "gateway/results.json", {**result, "goals": goals[1:]})
    block = page.benchmarks(tmp_path)

    assert "They also miss" not in block
    assert "(best: " not in block


def test_behaviour_table_has_failures_in_bold_and_links_pictures(tmp_path: Path) -> None:
    behaviour = {
        "forebay": {"left_midstream_ms": {"value": 2.0, "passed": True}},
        "other": {
            "left_midstream_ms": {"value": None, "passed": False, "why": "not seen"},
            "slow_reader_mb": {"value": 65.0, "passed": False},
        },
    }
    limits = dict.fromkeys(gateway.BEHAVIOUR, 100.0)
    versions = {"forebay": "0.1", "other": "2"}
    write(tmp_path / "bench/gateway/behaviour.json", {"versions": versions, "limits": limits, "behaviour": behaviour})
    block = page.benchmarks(tmp_path / "bench")

    assert f"| {gateway.BEHAVIOUR['left_midstream_ms']} | ≤ 100 | 2 | **failed** |" in block
    assert f"| {gateway.BEHAVIOUR['slow_reader_mb']} | ≤ 100 | - | **65** |" in block
    assert page.CHART not in page.summary(tmp_path / "bench")

    write(tmp_path / page.CHART, "")
    assert f"]({page.CHART})" in page.summary(tmp_path / "bench")


def test_batch_flood_is_shown_beside_the_baseline(tmp_path: Path) -> None:
    ttft = {"ttft_p50_ms": 38.0, "ttft_p95_ms": 50.0, "ttft_p99_ms": 60.0}
    flood = {**ttft, "ttft_p99_ratio": 1.25, "flood_requests_per_s": 4.5, "flood_ratio": 0.45}
    figures = {"alone": ttft, "batch_alone": {"flood_requests_per_s": 10.0}, "batch_flood": flood}
    run = {"rounds": 3, "capacity_requests_per_s": 18.0, "figures": figures}
    write(tmp_path / "priority/results.json", {"machine": MACHINE, "models": {"synthetic": run}})
    block = page.benchmarks(tmp_path)

    assert "| synthetic | half load, alone | 38 ms | 50 ms | 60 ms |  |  |  |" in block
    assert "| synthetic | with the flood as `batch` | 38 ms | 50 ms | 60 ms | 1.25x | 4.5 | 45% |" in block


def test_model_server_is_compared_with_others_and_missed_goals(tmp_path: Path) -> None:
    def goal(*values: object) -> dict[str, object]:
        return dict(
            zip(("model", "goal", "ours", "beside", "bound", "value", "met"), ("embed", *values), strict=True)
        )

    part = {"cpu_us": 63.0, "server_us": 16.0}
    ours = {"closed": {"per_s": 15738.0, "pss_mb": 128.0}, "open": {"per_s": 11000.0, "p99_ms": 5.84, "cpu_us": 80.0}}
    figures = {
        "embed": {
            "bare": {"closed": {"per_s": 184891.0, "rows": 4.0}},
            "bare_whole": {"closed": {"per_s": 150000.0, "rows": 32.0}},
            "forebay": ours,
            "triton_grpc": {},
            "bare_http": {"closed": {"cpu_us": 5.4}},
            "forebay_grpc": {"closed": part},
            "forebay_json": {"closed": part},
        }
    }
    goals = [
        goal("throughput, at least", "bare_http", "bare", 0.95, 0.3, False),
        goal("throughput, at least", "forebay", "bare", 0.95, 0.09, False),
        goal("throughput, at least", "forebay", "triton_grpc", 1.2, 1.45, True),
        goal("p99, at most", "forebay_grpc", "triton_grpc", 1.0, 1.04, False),
        goal("rate, at least", "forebay", "", 2000.0, 11000.0, True),
    ]
    versions = {"forebay": "0.1", "triton_grpc": "2.51.0, onnxruntime==1.23.2"}
    result = {"machine": MACHINE, "rounds": 3, "versions": versions, "figures": figures, "goals": goals}
    write(tmp_path / "server/results.json", result)
    block = page.benchmarks(tmp_path)

    assert "**Model servers, `embed`, on one core** (2 cores, Python 3.11, median of 3 rounds):" in block
    assert "| bare, 4 rows at once | 184,891 | - | - | - | - | - |" in block
    assert "| bare-whole, 32 rows at once | 150,000 | - | - | - | - | - |" in block
    assert "| **forebay 0.1** | 15,738 | - | 128 | 11,000 | - | 5.84 | 88% |" in block
    assert "| triton-grpc 2.51.0 | - | - | - | - | - | - |" in block
    assert "| model | server | goal | bound | vs bare | vs triton-grpc | value |" in block
    assert "| embed | bare-http | throughput, at least | 0.95x | **0.30x** |  |  |" in block
    assert "| embed | forebay | throughput, at least | 0.95x | **0.09x** |  |  |" in block
    assert "| embed | forebay | throughput, at least | 1.2x |  | 1.45x |  |" in block
    assert "| embed | forebay-grpc | p99, at most | 1x |  | **1.04x** |  |" in block
    assert "| embed | forebay | rate, at least | 2,000 |  |  | 11,000 |" in block
    assert "have the core in turns" in block
    parts = block.partition("**Where the time goes**")[2]
    assert "| embed | bare-http | 5.4 |  |  |" in parts
    assert "| embed | forebay-grpc | 63 | 16 | 47 |" in parts
    assert parts.count("| embed |") == 2

    brief = page.summary(tmp_path)
    assert "| model | forebay / bare | forebay / triton-grpc |" in brief
    assert "| embed | 0.09x | 1.45x |" in brief
    assert "throughput, at least" not in brief

    write(tmp_path / "server/results.json", {**result, "goals": []})
    assert "**Goals" not in page.benchmarks(tmp_path)
    assert "as ratios" not in page.summary(tmp_path)


def test_missed_model_server_goal_is_shown_with_the_attainable_limit(tmp_path: Path) -> None:
    def shown(of_bare: float | None = 0.45, with_sockets: float | None = None) -> str:
        figures = {"embed": {"bare": {"closed": {"per_s": 100.0}}}}
        goals = [
            {"model": "embed", "goal": goal, "ours": ours, "beside": beside, "bound": 1.2, "value": value, "met": met}
            for goal, ours, beside, value, met in (
                ("throughput, at least", "bare_http", "bare", with_sockets, False),
                ("throughput, at least", "forebay", "triton", 0.9, False),
                ("throughput, at least", "forebay_grpc", "triton", 0.9, False),
                ("throughput, at least", "forebay_json", "triton", 0.9, True),
                ("p99, at most", "forebay", "triton", 0.9, False),
                ("throughput, at least", "forebay", "bare", of_bare, False),
                ("throughput, at least", "forebay_grpc", "bare", of_bare, True),
            )
            if value is not None
        ]
        result = {"machine": MACHINE, "rounds": 3, "versions": {}, "figures": figures, "goals": goals}
        write(tmp_path / "server/results.json", result)
        return page.benchmarks(tmp_path).partition("**Ceilings")[2]

    runtime = shown()
    assert "| embed | forebay | triton | 1.20x | 2.00x | 0.90x | 45% |" in runtime
    assert "| embed | forebay-grpc | triton | 1.20x | 2.00x | 0.90x | 45% |" in runtime
    assert "| embed | forebay | bare | 1.20x | 1.00x | 0.45x | 45% |" in runtime
    assert runtime.count("| embed |") == 3
    sockets = shown(with_sockets=0.5)
    assert "| embed | forebay | triton | 1.20x | 1.00x | 0.90x | 90% |" in sockets
    assert "| embed | forebay-grpc | triton | 1.20x | 2.00x | 0.90x | 45% |" in sockets
    assert "| embed | forebay | bare | 1.20x | 0.50x | 0.45x | 90% |" in sockets
    assert sockets.count("| embed |") == 3
    assert shown(None) == ""


def test_model_server_goals_are_shown_for_another_machine(tmp_path: Path) -> None:
    figures = {"embed": {name: {"closed": {"per_s": value}} for name, value in (("bare", 370.0), ("triton", 326.0))}}
    goal = dict.fromkeys(("model", "ours", "beside"), "") | {"goal": "throughput, at least", "bound": 1.2}
    missed = goal | {"model": "embed", "ours": "forebay", "beside": "triton", "value": 1.1, "met": False}
    there = MACHINE | {"processor": "Other"}
    met = missed | {"beside": "bare", "bound": 0.95, "value": 0.97, "met": True}
    result = {"machine": there, "rounds": 2, "versions": {}, "figures": figures, "goals": [missed, met]}
    write(tmp_path / "server/epyc.json", {**result, "beside": "others on other cores"})
    block = page.benchmarks(tmp_path)

    where = "2 cores of Other, Python 3.11, median of 2 rounds, others on other cores"
    assert f"**The same on another machine** ({where}; requests/s of `bare` there: 370 of `embed`):" in block
    assert "| embed | forebay | throughput, at least | 1.2x | **1.10x** |" in block
    assert "| embed | forebay | triton | 1.20x | 1.13x | 1.10x | 97% |" in block
    assert "Forebay finds out how many rows of a batch to run at once." in block
