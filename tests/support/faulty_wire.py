"""A TCP relay between two machines that knows where frames begin, and does one bad thing at one of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from poolwright_protocol import handoff as wire


class Bad(StrEnum):
    CUT = "cut"  # both directions end before the frame
    CUT_INSIDE = "cut inside"  # half of the frame, then the end
    CORRUPT = "corrupt"  # one bit of the payload, or of the header where there is none
    TWICE = "twice"
    DROPPED = "dropped"
    SILENCE = "silence"  # this direction says nothing more
    LATE = "late"


@dataclass(frozen=True)
class Fault:
    """At frame number `frame` (from 0, of all connections of one direction)."""

    bad: Bad
    back: bool  # towards the one who connected
    frame: int


@dataclass
class Relay:
    port: int
    done: list[Fault] = field(default_factory=list)


@asynccontextmanager
async def relay(to_port: int, *faults: Fault, late_seconds: float = 0.1) -> AsyncIterator[Relay]:
    tasks: set[asyncio.Task[None]] = set()
    frames = {False: 0, True: 0}
    state = Relay(0)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: bool) -> None:
        silent = False
        while True:
            prefix = await reader.readexactly(wire.PREFIX_BYTES)
            frame = bytearray(prefix + await reader.readexactly(sum(wire.sizes(prefix))))
            number, frames[back] = frames[back], frames[back] + 1
            for fault in faults:
                if (fault.back, fault.frame) != (back, number):
                    continue
                state.done.append(fault)
                match fault.bad:
                    case Bad.CUT:
                        return
                    case Bad.CUT_INSIDE:
                        writer.write(frame[: len(frame) // 2])
                        return
                    case Bad.CORRUPT:
                        frame[-1] ^= 1
                    case Bad.TWICE:
                        writer.write(frame)
                    case Bad.DROPPED:
                        frame.clear()
                    case Bad.SILENCE:
                        silent = True
                    case Bad.LATE:
                        await asyncio.sleep(late_seconds)
            if not silent:
                writer.write(frame)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            there, back = await asyncio.open_connection("127.0.0.1", to_port)
            writers.append(back)
            ways = [asyncio.create_task(carry(reader, back, False)), asyncio.create_task(carry(there, writer, True))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            for one in writers:
                one.close()
            for way in ways:
                way.cancel()
            try:
                async with asyncio.timeout(0.2):
                    await asyncio.gather(*ways, *(one.wait_closed() for one in writers), return_exceptions=True)
            except TimeoutError:
                pass
            finally:
                for one in writers:
                    one.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also where it was cancelled before it began

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
