"""Network faults between nodes: delays, partitions, resets, killed processes, vanished hosts."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.network.recording_protocol import HOST, PORT, End, on
from tests.sim.virtual import elapse

from forebay.sim.network.links import ANY, Shape
from forebay.sim.network.network import CONNECT_TRIES_S, Network


class Pair:
    """A connection from node a to node b; `heard` is what each end was told, with times."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.client = End(keeps_open=True)
        self.server = End(keeps_open=True)

    async def join(self) -> None:
        loop = asyncio.get_running_loop()
        with self.network.node("b"):
            await loop.create_server(lambda: self.server, HOST, PORT)
        with self.network.node("a"):
            await loop.create_connection(lambda: self.client, HOST, PORT)


def now() -> float:
    return asyncio.get_running_loop().time()


def with_pair(scenario: Callable[[Network, Pair], Awaitable[Any]], network: Network | None = None) -> Any:
    network = network or Network(Random(1))

    async def main() -> Any:
        pair = Pair(network)
        await pair.join()
        return await scenario(network, pair)

    return on(network, main)


def test_bytes_arrive_after_the_link_delay_and_connecting_takes_a_round_trip() -> None:
    network = Network(Random(1))
    network.shape("a", "b", Shape(delay_s=0.1))

    async def scenario(network: Network, pair: Pair) -> None:
        assert now() == pytest.approx(0.2)
        pair.client.transport.write(b"x")
        await elapse(0.0999)
        assert pair.server.received_bytes == 0
        await elapse(0.0002)
        assert pair.server.received_bytes == 1
        network.shape("a", shape=Shape(delay_s=10))  # the rule for the two goes before it
        pair.server.transport.write(b"y")
        await elapse(0.11)
        assert pair.client.received_bytes == 1

    with_pair(scenario, network)


def test_link_bandwidth_is_shared_between_connections() -> None:
    network = Network(Random(1))
    network.shape("a", "b", Shape(bytes_per_s=65_536))

    async def scenario(network: Network, pair: Pair) -> None:
        other = End()
        with network.node("a"):
            await asyncio.get_running_loop().create_connection(lambda: other, HOST, PORT)
        pair.client.transport.write(b"x" * 4 * 65_536)
        await elapse(2.5)
        assert pair.server.received_bytes == 2 * 65_536
        other.transport.write(b"x")  # behind what was sent before
        before = pair.server.received_bytes
        await elapse(1.4)
        assert pair.server.received_bytes == before + 65_536
        network.heal()
        await elapse(0.001)
        assert pair.server.received_bytes == 4 * 65_536 + 1

    with_pair(scenario, network)


@given(st.lists(st.binary(min_size=1, max_size=2000), max_size=30), st.integers(0, 2**32), st.booleans())
def test_bytes_arrive_complete_and_in_order_under_jitter(parts: list[bytes], seed: int, chop: bool) -> None:
    network = Network(Random(seed), chop=chop)
    network.shape(ANY, ANY, Shape(delay_s=0.01, jitter_s=5, bytes_per_s=10_000))
    got = bytearray()

    async def scenario(network: Network, pair: Pair) -> None:
        pair.server.data_received = got.extend  # type: ignore[method-assign,assignment]
        for part in parts:
            pair.client.transport.write(part)
            await elapse(0.1)
        pair.client.transport.write_eof()
        await elapse(100)
        assert pair.server.told[-1] == "eof"

    with_pair(scenario, network)
    assert bytes(got) == b"".join(parts)


def test_chopping_delivers_bytes_in_pieces_of_many_sizes() -> None:
    network = Network(Random(1), chop=True)
    sizes: list[int] = []

    async def scenario(network: Network, pair: Pair) -> None:
        pair.server.data_received = lambda data: sizes.append(len(data))  # type: ignore[method-assign]
        pair.client.transport.write(b"x" * 200_000)
        await elapse(1)

    with_pair(scenario, network)
    assert sum(sizes) == 200_000
    assert min(sizes) < 10
    assert max(sizes) > 5000


@pytest.mark.parametrize(("a", "b"), [("a", "b"), ("a", ANY), (ANY, "a"), (ANY, ANY)])
def test_partition_delivers_nothing_until_it_heals(a: str, b: str) -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.cut(a, b)
        pair.client.transport.write(b"lost?")
        pair.server.transport.write(b"me, too?")
        pair.server.transport.write_eof()
        await elapse(500)
        assert (pair.client.told, pair.server.told) == (["made"], ["made"])
        network.mend(a, b)
        await asyncio.sleep(0)
        await elapse(0.001)
        assert (pair.client.received_bytes, pair.server.received_bytes) == (8, 5)
        assert pair.client.told == ["made", "data", "eof"]

    with_pair(scenario)


def test_one_way_partition_leaves_the_other_direction() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.cut("a", "b", both=False)
        pair.client.transport.write(b"unheard")
        pair.server.transport.write(b"heard")
        await elapse(1)
        assert (pair.client.received_bytes, pair.server.received_bytes) == (5, 0)
        network.mend("b", "a", both=False)
        await elapse(1)
        assert pair.server.received_bytes == 0
        network.mend("a", "b", both=False)
        await elapse(1)
        assert pair.server.received_bytes == 7

    with_pair(scenario)


def test_partition_fills_the_window_and_then_the_send_buffer() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.cut("b")
        pair.client.transport.write(b"x" * 1_000_000)
        assert pair.client.told == ["made", "pause"]
        assert 0 < pair.client.transport.get_write_buffer_size() < 1_000_000
        network.heal()
        await elapse(1)
        assert pair.client.told == ["made", "pause", "resume"]
        assert pair.server.received_bytes == 1_000_000

    with_pair(scenario)


def test_partition_of_all_nodes_does_not_affect_loopback() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.cut("b")
        with network.node("b"):
            own = End()
            await asyncio.get_running_loop().create_connection(lambda: own, HOST, PORT)
        assert own.told == ["made"]

    with_pair(scenario)


def test_reset_ends_both_sides_and_loses_bytes_in_flight() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.shape(ANY, ANY, Shape(delay_s=1))
        pair.client.transport.write(b"under way")
        pair.server.transport.write(b"this, too")
        network.reset("a", "b")
        await elapse(5)
        assert pair.client.told == pair.server.told == ["made", "ConnectionResetError"]
        assert pair.client.transport.is_closing()
        assert network.connections == 0

    with_pair(scenario)


def test_one_sided_reset_is_noticed_by_the_peer_when_it_writes() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        pair.client.transport.write(b"under way to the other side")
        network.reset("a", both=False)
        await elapse(100)
        assert (pair.client.told, pair.server.told) == (["made", "ConnectionResetError"], ["made", "data"])
        pair.server.transport.write(b"hello?")
        await elapse(1)
        assert pair.server.told == ["made", "data", "ConnectionResetError"]

    with_pair(scenario)


def test_reset_is_noticed_only_on_read_or_write() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        for end in (pair.client, pair.server):
            end.transport.pause_reading()
        network.reset("a")
        await elapse(1)
        assert (pair.client.told, pair.server.told) == (["made"], ["made"])
        pair.client.transport.resume_reading()
        pair.server.transport.write(b"x")
        await elapse(1)
        assert pair.client.told == pair.server.told == ["made", "ConnectionResetError"]

    with_pair(scenario)


def test_reset_is_noticed_at_once_with_unsent_bytes() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        for end in (pair.client, pair.server):
            end.transport.pause_reading()
        pair.client.transport.write(b"x" * 1_000_000)
        network.reset("a")
        await elapse(1)
        assert pair.client.told == ["made", "pause", "ConnectionResetError"]

    with_pair(scenario)


def test_reset_into_a_partition_is_lost() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        pair.client.transport.pause_reading()
        pair.server.transport.write(b"unread")
        network.shape(ANY, ANY, Shape(delay_s=1))
        await elapse(0.01)
        pair.client.transport.close()  # over unread bytes: a reset is under way
        await elapse(0.5)
        network.cut("a")
        await elapse(100)
        network.mend("a")
        await elapse(100)
        assert pair.server.told == ["made"]
        pair.server.transport.write(b"x")
        await elapse(2.1)
        assert pair.server.told == ["made", "ConnectionResetError"]

    with_pair(scenario)


def test_kernel_closes_connections_of_a_killed_process() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.kill("b")
        await elapse(1)
        assert (pair.client.told, pair.server.told) == (["made", "eof"], ["made"])
        assert pair.server.transport.is_closing()
        pair.client.transport.write(b"anybody?")
        await elapse(1)
        pair.client.transport.write(b"anybody?")
        await elapse(1)
        assert pair.client.told == ["made", "eof", "BrokenPipeError"]
        with network.node("a"), pytest.raises(ConnectionRefusedError):
            await asyncio.get_running_loop().create_connection(End, HOST, PORT)
        pair.server.transport.write(b"from the grave")
        pair.server.transport.abort()  # its tasks clean up when they are cancelled
        await elapse(1)
        assert pair.server.told == ["made", "lost"]
        await asyncio.get_running_loop().create_server(End, HOST, PORT)  # its successor gets the port

    with_pair(scenario)


def test_a_process_killed_over_unread_bytes_resets_its_connections() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        pair.server.transport.pause_reading()
        pair.client.transport.write(b"unread")
        await elapse(1)
        network.kill("b")
        await elapse(1)
        assert pair.client.told == ["made", "ConnectionResetError"]
        assert network.connections == 0

    with_pair(scenario)


def test_vanished_host_is_silent_until_it_is_back() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.vanish("b")
        pair.client.transport.write(b"x")
        pair.server.transport.write(b"from nowhere")
        with network.node("a"), pytest.raises(OSError, match="timed out") as caught:
            await asyncio.get_running_loop().create_connection(End, HOST, PORT)
        assert caught.value.errno == errno.ETIMEDOUT
        assert now() == sum(CONNECT_TRIES_S)
        assert (pair.client.told, pair.server.told) == (["made"], ["made"])
        network.come_back("b")
        await elapse(1)
        assert (pair.client.told, pair.server.told) == (["made", "ConnectionResetError"], ["made"])
        with network.node("a"), pytest.raises(ConnectionRefusedError):
            await asyncio.get_running_loop().create_connection(End, HOST, PORT)
        assert network.connections == 0

    with_pair(scenario)


def test_refusing_host_keeps_open_connections_and_can_accept_again() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        network.shape("a", "b", Shape(delay_s=1))
        with network.node("a"):
            network.refuse("b")
            with pytest.raises(ConnectionRefusedError):
                await loop.create_connection(End, HOST, PORT)
            assert now() == 2
            network.refuse("b", False)
            await loop.create_connection(End, HOST, PORT)
            network.refuse("b")
            network.heal()
            await loop.create_connection(End, HOST, PORT)
        assert pair.client.told == ["made"]
        assert network.connections == 3

    with_pair(scenario)


def test_connecting_through_a_partition_succeeds_if_it_heals_in_time() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        network.cut("a", both=False)
        loop.call_later(2.5, network.heal)
        with network.node("a"):
            await loop.create_connection(End, HOST, PORT)
        assert now() == 3  # asked at 0, 1 and 3 s

    with_pair(scenario)


def test_abandoned_connection_attempt_leaves_nothing_behind() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        network.shape("c", "b", Shape(delay_s=1))
        with network.node("c"), pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.get_running_loop().create_connection(End, HOST, PORT)
        await elapse(5)
        assert pair.server.told == ["made", "made", "eof"]

    with_pair(scenario)


def test_process_killed_during_accept_gets_no_callbacks() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        network.shape("a", "b", Shape(delay_s=1))
        outcomes = []
        for turns in range(5):
            with network.node("a"):
                connecting = loop.create_task(loop.create_connection(End, HOST, PORT))
            await elapse(1)
            for _ in range(turns):
                await asyncio.sleep(0)
            network.kill("b")
            told = pair.server.told[:]
            await asyncio.wait([connecting])
            outcomes.append(type(connecting.exception()))
            assert pair.server.told == told
            with network.node("b"):
                await loop.create_server(lambda: pair.server, HOST, PORT)
        assert outcomes == [ConnectionRefusedError, *[type(None)] * 4]

    with_pair(scenario)


def test_reset_in_reply_to_data_does_not_cross_a_partition() -> None:
    async def scenario(network: Network, pair: Pair) -> None:
        pair.server.transport.abort()
        await elapse(1)
        network.cut("b", "a", both=False)
        pair.client.transport.write(b"x")
        await elapse(1)
        assert pair.client.told == ["made", "eof"]

    with_pair(scenario)
