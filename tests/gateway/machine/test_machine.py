"""Whatever happens to requests, in whatever order: each ends once, and every account is back at zero."""

from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from tests.gateway.machine.accounting import audit
from tests.gateway.machine.api_formats import CHAT, COUNT, EMBED, MESSAGES, RESPONSES, TOKENIZE, WORDS
from tests.gateway.machine.clients import Client
from tests.gateway.machine.replicas import REFLEXES, REPORTS, SCRIPTS, STEPS, Node, Step
from tests.gateway.machine.world import BASE, KEYS, MODELS, TENANTS, World

from forebay.core.model import Policy, ReplicaState, Sessions, StandIn
from forebay.core.tenancy import Amounts, Directory, Lease

STREAMED, WHOLE = (CHAT, CHAT, MESSAGES, RESPONSES), (CHAT, COUNT, TOKENIZE, COUNT)
"""What clients ask for."""
NAMES = (
    "chat", "chat", "chat", "chat", "spare", "spare", "embed", "embed", "gpt", "auto", "auto", "chat@r1", "chat@r2",
    "gpt@r2", "chat@r9", "nobody",
)  # fmt: skip
HEADERS: tuple[dict[str, str], ...] = (
    {}, {}, {}, {}, {}, {"x-forebay-deadline-ms": "400"}, {"x-forebay-deadline-ms": "no"},
    {"x-forebay-priority": "now"}, {"x-forebay-fallback": "deny"}, {"x-forebay-session": "s"}, 
    {"x-forebay-session": "t"}, {"cookie": "forebay-session=u"}, {"x-small": "1"},
    {"x-forebay-budget-ms": "-"},
)  # fmt: skip
PRIORITIES = ("batch", "batch", "batch", "default", "default", "default", "interactive", "interactive", "system")
SOME = st.integers(0, 30)


class GatewayMachine(RuleBasedStateMachine):
    """Requests, replicas, clients and control, in any order."""

    world: World

    @initialize(
        keys=st.sampled_from([False, False, True]),
        policy=st.sampled_from(Policy),
        queue_max=st.integers(0, 3),
        count=st.integers(0, 8),
        priority=st.sampled_from(PRIORITIES),
        sessions=st.sampled_from(Sessions),
    )
    def begin(
        self, *, keys: bool, policy: Policy, queue_max: int, count: int, priority: str, sessions: Sessions
    ) -> None:
        self.asked = 0
        self.world = world = World(keys=keys)
        world.routes["chat"] = replace(
            world.routes["chat"], policy=policy, queue_max=queue_max, sessions=sessions
        )  # fmt: skip
        world.publish()
        world.pass_s(1.0)
        for n in range(count):
            self.ask("chat", stream=True, tenant="gold", priority=priority, header={}, size=n)

    # --- clients

    def ask(self, name: str, *, stream: bool, tenant: str, priority: str, header: dict[str, str], size: int) -> None:
        world = self.world
        self.asked += 1
        if name == "embed":
            path = TOKENIZE if size % 4 == 3 else EMBED
        else:
            path = (STREAMED if stream else WHOLE)[size % 4]
        text = "word " * (size * 60)
        body: dict[str, object] = {"model": name}
        if path in (CHAT, MESSAGES, COUNT):
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["input"] = text
        if path not in (EMBED, COUNT, TOKENIZE):
            body["stream"] = stream
        headers = {"x-request-id": f"q{self.asked}", "authorization": f"Bearer {KEYS[tenant][0]}", **header}
        if priority != "default":
            headers.setdefault("x-forebay-priority", priority)
        if size % 5 == 4 and world.clients and world.clients[-1].open:
            client = world.clients[-1]  # a second request on its connection, before the first is answered
        else:
            client = Client(world.loop, world.server)
            world.clients.append(client)
        world.loop.act(lambda: world.ask(client, path, body, headers))

    @rule(
        count=st.integers(1, 5),
        name=st.sampled_from(NAMES),
        stream=st.sampled_from([True, True, False]),
        tenant=st.sampled_from(["gold", "gold", "gold", "batch", "gone"]),
        priority=st.sampled_from(PRIORITIES),
        header=st.sampled_from(HEADERS),
        size=SOME,
    )
    def requests_come(
        self, *, count: int, name: str, stream: bool, tenant: str, priority: str, header: dict[str, str], size: int
    ) -> None:
        for _ in range(count):
            self.ask(name, stream=stream, tenant=tenant, priority=priority, header=header, size=size)

    @rule(
        count=st.integers(1, 6),
        stream=st.sampled_from([True, True, False]),
        priority=st.sampled_from(PRIORITIES),
        size=SOME,
    )
    def many_requests_come(self, count: int, stream: bool, priority: str, size: int) -> None:
        for _ in range(count):
            self.ask("chat", stream=stream, tenant="gold", priority=priority, header={}, size=size)

    @rule(
        count=st.integers(1, 3),
        name=st.sampled_from(["embed", "embed", "chat"]),
        seconds=st.sampled_from([0.0, 0.6, 0.6]),
        script=st.sampled_from(((), *SCRIPTS)),
        late=SOME,
    )
    def short_requests_are_late(
        self, count: int, name: str, seconds: float, script: tuple[Step, ...], late: int
    ) -> None:
        for n in range(count):
            self.ask(name, stream=False, tenant="gold", priority="default", header={}, size=1 + 2 * n)
        self.world.pass_s(seconds)
        hedged = {hedge.request_id.decode() for hedge in self.world.hedges()}
        jobs = [job for job in self.world.jobs if job.id in hedged]
        if jobs:
            self.world.loop.act(lambda: jobs[late % len(jobs)].do(*script))

    @precondition(lambda self: self.world.clients)
    @rule(
        which=SOME,
        what=st.sampled_from(["leaves", "leaves", "falls behind", "falls far behind", "falls far behind", "reads"]),
    )
    def a_client_acts(self, which: int, what: str) -> None:
        clients = [client for client in self.world.clients if client.open]
        if not clients:
            return
        client = clients[-1 - which % len(clients)]
        if what == "leaves":
            self.world.loop.act(client.leave)
        elif what == "reads":
            self.world.loop.act(client.catches_up)
        else:
            self.world.loop.act(lambda: client.falls_behind("far" in what))

    # --- replicas

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), which=SOME, times=st.integers(1, 3))
    def a_replica_works(self, data: st.DataObject, which: int, times: int) -> None:
        jobs = self.world.jobs
        job = jobs[-1 - which % len(jobs)]
        for _ in range(times):
            if job.gone or job.words > len(WORDS) - 20:
                return
            step = data.draw(st.sampled_from(STEPS[job.phase]))
            self.world.loop.act(lambda: job.do(step))  # noqa: B023 - done at once

    @precondition(lambda self: self.world.jobs)
    @rule(which=SOME, count=st.sampled_from([1, 1, 2, 9]), script=st.sampled_from(SCRIPTS))
    def things_take_their_course(self, which: int, count: int, script: tuple[Step, ...]) -> None:
        jobs = self.world.jobs
        first = which % len(jobs)
        for job in jobs[first : first + count]:
            self.world.loop.act(lambda: job.do(*script))  # noqa: B023 - done at once

    @rule(which=SOME, reflex=st.sampled_from(REFLEXES))
    def a_replica_makes_a_habit_of_it(self, which: int, reflex: Step | None) -> None:
        self.some_node(which).reflex = reflex

    def some_node(self, which: int) -> Node:
        nodes = [slot.node for slot in self.world.slots if slot.node is not None]
        return nodes[which % len(nodes)]

    @precondition(lambda self: self.world.jobs)
    @rule(count=st.integers(1, 8))
    def requests_are_answered(self, count: int) -> None:
        for job in self.world.jobs[:count]:
            if not job.gone:
                self.world.loop.act(job.complete)

    @rule(which=SOME, mode=st.sampled_from(REPORTS), at_once=st.booleans())
    def a_replica_reports(self, which: int, mode: str, at_once: bool) -> None:
        self.some_node(which).mode = mode
        if at_once:
            self.world.pass_s(1.0)

    @rule(which=SOME, reach=st.sampled_from(["open", "open", "open", "refused", "silent", "crash"]))
    def a_replica_is_lost_or_found(self, which: int, reach: str) -> None:
        node = self.some_node(which)
        if reach == "crash":
            self.world.loop.act(node.crash)
        else:
            node.reach = reach

    # --- control

    @rule(
        which=SOME,
        what=st.sampled_from(["add", "remove", "renew", "drain", "degrade", "ready"]),
        room=st.integers(1, 3),
    )
    def control_changes_a_replica(self, which: int, what: str, room: int) -> None:
        slot = self.world.slots[which % len(self.world.slots)]
        states = {"drain": ReplicaState.DRAINING, "degrade": ReplicaState.DEGRADED}
        slot.state = states.get(what, ReplicaState.READY)
        slot.wanted = what != "remove"
        slot.capacity = room
        if what == "renew":
            slot.node = None
        self.world.publish()

    @rule(
        name=st.sampled_from([routes.name for routes in MODELS]),
        policy=st.sampled_from(Policy),
        queue_max=st.integers(0, 3),
        timeout_s=st.sampled_from([0.5, 6.0, 40.0]),
        fallback=st.sampled_from([(), (StandIn("spare"),), (StandIn("chat"), StandIn("spare"))]),
        there=st.sampled_from([True, True, True, False]),
        sessions=st.sampled_from(Sessions),
        hedge_after_s=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def control_changes_a_model(
        self,
        *,
        name: str,
        policy: Policy,
        queue_max: int,
        timeout_s: float,
        fallback: tuple[StandIn, ...],
        there: bool,
        sessions: Sessions,
        hedge_after_s: float,
    ) -> None:
        world = self.world
        task = next(routes.task for routes in MODELS if routes.name == name)
        world.routes[name] = replace(
            BASE, name=name, task=task, policy=policy, queue_max=queue_max, queue_timeout_s=timeout_s,
            fallback=fallback, sessions=sessions, hedge_after_s=hedge_after_s,
        )  # fmt: skip
        if there:
            world.models[name] = None
        else:
            world.models.pop(name, None)
        world.publish()

    @precondition(lambda self: self.world.keys)
    @rule(tenant=st.sampled_from([tenant.name for tenant in TENANTS]))
    def a_key_is_revoked_or_made_anew(self, tenant: str) -> None:
        door, revoked = self.world.gateway.access, self.world.revoked
        revoked ^= {tenant}
        assert door is not None
        door._directory = Directory(TENANTS, [record for name, (_, record) in KEYS.items() if name not in revoked])
        door._known = {}

    @precondition(lambda self: self.world.keys)
    @rule(streams=st.integers(0, 9), requests=st.sampled_from([5, 60]), age_s=st.sampled_from([0.0, 5.0, 30.0]))
    def a_lease_comes(self, streams: int, requests: int, age_s: float) -> None:
        door = self.world.gateway.access
        assert door is not None
        now = self.world.loop.at
        door._limiter.take(Lease(now - age_s, 0.0, 0, {"gold": Amounts(requests, 90_000, streams, 900_000)}, {}), now)

    # --- time

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.3, 1.1, 2.5, 4.0, 7.0, 33.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_s(seconds)
        self.world.check_gauges()

    # --- what holds

    @invariant()
    def all_accounts_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                if self.world.sound and not self.world.loop.mishaps:
                    self.world.wind_up()
                    audit(self.world)
            finally:
                self.world.close()


FAST = settings(
    max_examples=examples(30), stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate]
)
"""What it finds it does not make smaller, which takes minutes: that the long one does."""
SLOW = settings(max_examples=min(400, settings().max_examples * 3 // 2), stateful_step_count=60, deadline=None)
"""The most are tried by `make fuzz`."""


class LongMachine(GatewayMachine):
    """The same, for longer."""


TestGateway = pytest.mark.interpreted(GatewayMachine.TestCase)
TestGateway.settings = FAST
TestGatewayLong = pytest.mark.interpreted(pytest.mark.timeout(900)(pytest.mark.slow(LongMachine.TestCase)))
TestGatewayLong.settings = SLOW
