"""Where agents come in: whoever connects has to prove that it was invited."""

import selectors
import socket
from collections.abc import Callable
from functools import partial

from shoal.engine.wire import Greeting, Invitation, Line, Refused

MAX_GREETINGS = 128
"""How many may be at the door who have not proved who they are. Then the one who has been there longest has to go."""


class Door:
    """Listens on every address, and hands over the lines of those that know the token of `invitation`.

    Nothing here waits: the selector calls when there is something to do, and `problem` is told once of each reason
    for which somebody was turned away.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        let_in: Callable[[Line], None],
        problem: Callable[[str], None],
    ) -> None:
        self._selector, self._let_in, self._problem = selector, let_in, problem
        self._greetings: list[Greeting] = []
        self._told: set[str] = set()
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, self._answer)
        self.invitation = Invitation.new(host, self._socket.getsockname()[1])

    def turn_away_slow(self, now: float) -> None:
        """Those who were given time to prove themselves, and let it pass, have to go."""
        for greeting in [each for each in self._greetings if now > each.until]:
            self._turn_away(greeting, "")

    def close(self) -> None:
        for greeting in self._greetings:
            greeting.socket.close()
        self._greetings.clear()
        self._socket.close()

    def _answer(self) -> None:
        try:
            connection = self._socket.accept()[0]
        except OSError:
            return
        try:
            greeting = Greeting(connection, self.invitation.token)
        except OSError:
            connection.close()
            return
        self._greetings.append(greeting)
        self._selector.register(greeting.socket, selectors.EVENT_READ, partial(self._greet, greeting))
        if len(self._greetings) > MAX_GREETINGS:
            self._turn_away(self._greetings[0], "")

    def _greet(self, greeting: Greeting) -> None:
        if greeting not in self._greetings:
            return  # it had to go a moment ago
        try:
            line = greeting.step()
        except (OSError, EOFError, Refused) as error:
            self._turn_away(greeting, str(error))
            return
        if line is not None:
            self._selector.unregister(greeting.socket)
            self._greetings.remove(greeting)
            self._let_in(line)

    def _turn_away(self, greeting: Greeting, why: str) -> None:
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.socket)
        greeting.socket.close()
        if why and why not in self._told:
            self._told.add(why)
            self._problem(f"somebody who connected was turned away: {why}")
