"""docs/scaling.svg: two days of the week, what comes and how many replicas there are.

python bench/scaling/picture.py
"""

from pathlib import Path
from typing import Final

from cells import WORKS, answers, ours
from trial import SLOW, local_s

from forebay.sim.fleet.fleet import Fleet
from forebay.sim.fleet.sizers import Planned, Scaler, ahead, needed, part, peak
from forebay.sim.report.chart import Chart, Series, svg

PICTURE: Final = Path(__file__).parents[2] / "docs" / "scaling.svg"
WORK: Final = "azure-week"
SEED: Final = 1
FROM_H, UNTIL_H = 24 * 3, 24 * 5
"""Monday and Tuesday: the week begins on a Friday."""
POINT_S: Final = 600.0
STYLE: Final = (
    "<style>text{font:11px sans-serif;fill:#555}.title{font-size:13px;font-weight:600}"
    "path{fill:none;stroke-width:1.5}"
    ".grid{stroke:#ccc;stroke-width:.5}.s0{stroke:#d1495b}.s1{stroke:#00798c}.s2{stroke:#888}.faint{opacity:.7}</style>"
)


def main() -> None:
    """Run the week, and draw two days of it."""
    load, replicas = WORKS[WORK].load(SEED), answers(WORK, 1.0)
    need = needed(load, replicas)
    plan = ahead(need, local_s() * SLOW, load.tick_s)
    each = round(POINT_S / load.tick_s)
    begin, end = int(FROM_H * 3600 / load.tick_s), int(UNTIL_H * 3600 / load.tick_s)
    lines = []
    for name, sizer in (("forebay", Scaler(ours())), ("oracle", Planned(plan))):
        result = Fleet(part(load, 0, end), replicas, sizer, start_s=local_s(), begin=need[0], seed=SEED).run()
        points = [((at - begin) * load.tick_s / 3600, float(result.wanted[at])) for at in range(begin, end, each)]
        lines.append(Series(f"{name}: replicas wanted", points, steps=True))
    most = peak(load, replicas, max(need))
    lines.append(Series(f"static peak: {most} replicas", [(0.0, most), (float(UNTIL_H - FROM_H), most)], faint=True))
    chart = Chart("Two days of the Azure code week", "hours", "replicas (4 GPUs each)", lines)
    text = svg(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    at = text.index(">") + 1
    PICTURE.write_text(f"{text[:at]}{STYLE}{text[at:]}\n")


if __name__ == "__main__":
    main()
