"""The settings of a cluster file about rollouts of a model, and what in them does not go together."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from forebay.core.deploy.course import COURSES, Course, Kind, problems
from forebay.core.errors import Conflict
from forebay.core.model import Task
from forebay.core.rollout.planning import Step
from forebay.core.rollout.values import Rate, Score, Time
from forebay.core.section import Name, Section, sections

ROUND_CASES_MAX: Final = 64
"""Cases of a golden set that are asked in one round: of a larger set some are drawn."""
USUAL: Final = Course()
RATE, TIME, SCORE = Rate(""), Time(""), Score("")
"""What holds where nothing else is said, of any metric."""
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]
Ratio = Annotated[float, Field(gt=1, le=100)]
Share = Annotated[float, Field(gt=0, lt=1)]
Quantile = Annotated[float, Field(ge=0.5, lt=1)]


class StepSettings(Section):
    """A step of a rollout."""

    share: Share
    """The new revision's share of the requests; of a shadow, the share that is copied."""
    time_s: Annotated[float, Field(gt=0, le=31_536_000)]
    """Longest time at that share, seconds."""


class PlanSettings(Section):
    """The default plan of a rollout; `forebay deploy --plan` overrides it."""

    kind: Kind = Kind.CANARY
    """`canary`: a growing share of the traffic, then all of it. `blue-green`: all of it at once, when there are as
    many new replicas as old. `shadow`: copies of requests, whose answers are discarded. `ab`: a share of callers for
    a time."""
    steps: tuple[StepSettings, ...] | None = None
    """Steps with growing shares; all of the traffic follows automatically. None: a canary has 5 % for 10 minutes,
    then 20 % for 30; a shadow 20 % for an hour; an A/B test 50 % for a day."""
    start_timeout_s: Seconds = USUAL.start_timeout_s
    """The rollout fails if the new revision's replicas are not ready within this time, seconds."""
    warm_up_s: Seconds = USUAL.warm_up_s
    """Requests that begin within this time after a change of the share are not evaluated, seconds."""
    settle_s: Seconds = USUAL.settle_s
    """How long the old revision's replicas are kept after they have lost all traffic, seconds."""
    no_verdict: Literal["hold", "rollback"] = "hold"
    """What to do if the last step ends without a verdict: wait for an operator's decision, or roll back."""

    def value(self) -> Course:
        """The course of a rollout."""
        given = self.steps
        return Course(
            kind=self.kind,
            steps=COURSES[self.kind].steps if given is None else tuple(Step(s.share, s.time_s) for s in given),
            start_timeout_s=self.start_timeout_s,
            warm_up_s=self.warm_up_s,
            settle_s=self.settle_s,
            hold=self.no_verdict == "hold",
        )


class RateSettings(Section):
    """How much more often something bad may happen than with the old revision."""

    ratio: Ratio = RATE.ratio
    """Tolerated ratio of the odds, new to old."""
    floor: Share = RATE.floor
    """Share that is tolerated in any case, whatever the old revision's is."""
    required: bool = True
    """Whether the new revision waits for proof that it happens no more often. Proof that it does always counts."""

    def value(self, name: str) -> Rate:
        """The metric."""
        return Rate(name, self.ratio, self.floor, self.required)


class DriftSettings(RateSettings):
    """How much more often something may happen that is not necessarily wrong."""

    required: bool = False
    """Whether the new revision waits for proof that it happens no more often. Proof that it does always counts."""


class FigureSettings(Section):
    """How much larger a figure may be than with the old revision."""

    ratio: Ratio = TIME.ratio
    """Tolerated ratio at the centre of the distribution."""
    tail: Quantile | None = TIME.tail
    """The quantile beyond which the tail begins; none: the tail is not judged."""
    tail_ratio: Ratio = TIME.tail_ratio
    """Tolerated ratio at that quantile."""


class TimeSettings(FigureSettings):
    """How much longer something may take than with the old revision."""

    required: bool = True
    """Whether the new revision waits for proof that it is no larger. Proof that it is always counts."""

    def value(self, name: str) -> Time:
        """The metric."""
        return Time(name, self.ratio, self.tail or 0.0, self.tail_ratio, required=self.required)


class LatencySettings(FigureSettings):
    """How much longer whole answers may take than with the old revision."""

    required: bool | None = None
    """Whether the new revision waits for proof; none: where there are no tokens (`embed` and `tensor`)."""

    def value(self, name: str, task: Task) -> Time:
        """The metric, for a model with such a task."""
        required = task is not Task.CHAT if self.required is None else self.required
        return Time(name, self.ratio, self.tail or 0.0, self.tail_ratio, required=required)


class LengthSettings(FigureSettings):
    """How much longer or shorter answers may be than with the old revision, in tokens."""

    ratio: Ratio = 1.5
    """Tolerated ratio, longer or shorter."""
    tail: Quantile | None = None
    """The quantile beyond which the tail begins; none: the tail is not judged."""
    required: bool = False
    """Whether the new revision waits for proof. Proof of a difference always counts."""

    def value(self, name: str) -> Time:
        """The metric."""
        return Time(name, self.ratio, self.tail or 0.0, self.tail_ratio, both_ways=True, required=self.required)


class ScoreSettings(Section):
    """How much lower the mean of a score, 0..1, may be than with the old revision."""

    drop: Share = SCORE.drop
    """So much."""
    required: bool = True
    """Whether the new revision waits for proof that it is no lower. Proof that it is always counts."""

    def value(self, name: str) -> Score:
        """The metric: both revisions answer the same prompts."""
        return Score(name, self.drop, paired=True, required=self.required)


class QualitySettings(ScoreSettings):
    """How much lower the mean score on the golden set may be."""

    drop: Share = 0.05
    """So much."""


class AgreementSettings(Section):
    """How far answers to the same request may differ in meaning: 1 minus the cosine of their embeddings."""

    drop: Share | None = None
    """Tolerated mean difference; none: 0.3, as two answers of one model at a temperature above 0 also differ, or 0.05
    if the model itself computes embeddings."""
    required: bool = True
    """Whether the new revision waits for proof that it is no lower. Proof that it is always counts."""

    def value(self, name: str, task: Task) -> Score:
        """The metric, for a model with such a task."""
        usual = 0.05 if task is Task.EMBED else 0.3
        return Score(name, usual if self.drop is None else self.drop, paired=True, required=self.required)


class PreferenceSettings(ScoreSettings):
    """How much more often the judge may prefer the old revision's answer to the new one's."""

    drop: Share = 0.1
    """Tolerated difference, as a share of the requests."""


class GoldenSettings(Section):
    """Questions with known answers, put to both revisions while they are compared."""

    file: Annotated[str, Field(min_length=1)]
    """JSON lines, one case each, as described in docs/rollouts.md; a relative path is resolved from where `forebay`
    runs. It is read when the comparison begins."""
    every_s: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """Interval between rounds, seconds. A round draws as many cases as there are, at most 64, with replacement."""
    at_once_max: Annotated[int, Field(ge=1, le=64)] = 2
    """Most concurrent questions per replica."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """An answer that takes longer counts as an error, seconds."""

    def per_s(self, cases: int) -> float:
        """How many cases a second are asked of a set with so many, if answers take no time."""
        return min(cases, ROUND_CASES_MAX) / self.every_s


class RolloutSettings(Section):
    """How new revisions of the model are rolled out, and what they are judged by."""

    plan: PlanSettings = PlanSettings()
    """The plan."""
    errors: RateSettings = RateSettings()
    """Requests that fail because of the replica."""
    rejections: DriftSettings = DriftSettings()
    """Requests that the replica rejects as invalid, such as prompts that are too long for it."""
    ttft: TimeSettings = TimeSettings()
    """Time to the first token."""
    tpot: TimeSettings = TimeSettings()
    """Time per output token after the first."""
    latency: LatencySettings = LatencySettings()
    """End-to-end time of an answer."""
    length: LengthSettings = LengthSettings()
    """Length of answers."""
    refusals: DriftSettings = DriftSettings()
    """Answers in which the model refuses to comply."""
    degenerate: DriftSettings = DriftSettings()
    """Answers that are empty or repeat themselves."""
    quality: QualitySettings = QualitySettings()
    """Score on the golden set, if there is one."""
    validity: ScoreSettings = ScoreSettings()
    """Shadow only: unusable answers, which are empty, repetitive, a refusal, or not the JSON that was asked
    for."""
    agreement: AgreementSettings = AgreementSettings()
    """Shadow only: how far its answers differ: embeddings, or texts if a `similarity` model is given."""
    preference: PreferenceSettings = PreferenceSettings()
    """Shadow only: whose answers are better, if a `judge` is given."""
    rollback_alpha: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.05
    """Probability that a revision within all tolerances is rolled back, however long the comparison lasts."""
    promote_alpha: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.05
    """Probability that a revision beyond a tolerance is accepted."""
    golden: GoldenSettings | None = None
    """The golden set; none: quality is not judged."""
    judge: Name | None = None
    """A chat model of the cluster that compares and grades answers."""
    similarity: Name | None = None
    """An embedding model of the cluster that measures how similar two answers are."""

    def course(self, kind: Kind | None = None) -> Course:
        """The course of a rollout: as `plan` says, but for another kind with the steps that it has by itself."""
        if kind is None or kind is self.plan.kind:
            return self.plan.value()
        return self.plan.model_copy(update={"kind": kind, "steps": None}).value()


def plan_conflicts(raw: Mapping[str, Any], path: str = "") -> Iterator[Conflict]:
    """Conflicts within a plan given as plain data, at `path`."""
    try:
        plan = PlanSettings.model_validate(raw)
    except ValidationError:
        return  # others report those
    for problem in problems(plan.value()):
        name, _, allowed = problem.partition(": ")
        value = getattr(plan, name)
        shares = ", ".join(f"{step.share:g}" for step in plan.steps or ())
        shown = f"{value:g}" if isinstance(value, float) else f"{plan.kind} with {shares or 'no steps'}"
        yield Conflict(f"{path}.{name}" if path else name, shown, allowed)


def rollout_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts of the `rollout` sections of a cluster given as plain data."""
    models = sections(raw.get("models"))
    tasks = {model["name"]: model.get("task") for model in models if isinstance(model.get("name"), str)}
    for index, model in enumerate(models):
        section = model.get("rollout")
        if not isinstance(section, Mapping):
            continue
        path = f"models[{index}].rollout"
        plan = section.get("plan")
        if isinstance(plan, Mapping):
            yield from plan_conflicts(plan, f"{path}.plan")
        yield from _asked_conflicts(path, model, section, tasks)


def _asked_conflicts(
    path: str, model: Mapping[str, Any], section: Mapping[str, Any], tasks: Mapping[str, Any]
) -> Iterator[Conflict]:
    """Models that cannot be asked, and answers that cannot be judged."""
    for key, task in (("judge", Task.CHAT), ("similarity", Task.EMBED)):
        name = section.get(key)
        if not isinstance(name, str):
            continue
        fitting = sorted(other for other, its in tasks.items() if its == task and other != model.get("name"))
        if name not in fitting:
            allowed = f"another model with the task {task}: {', '.join(fitting) or 'there is none'}"
            yield Conflict(f"{path}.{key}", f'"{name}"', allowed)
    if model.get("task") in (Task.EMBED, Task.TENSOR):
        for key in ("golden", "judge", "similarity"):
            if section.get(key) is not None:
                yield Conflict(f"{path}.{key}", "a setting", "nothing: only answers of `task: chat` can be judged")
